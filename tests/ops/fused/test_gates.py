"""The kernels of gates against plain torch: the log-decay, and factors per channel."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from fused_cases import HALF, Case, Results, opcheck, test_interpreted, test_on_the_gpu  # noqa: F401

from deltazoo.ops.decay import log_decay as log_decay_of
from deltazoo.ops.decay import saturating_decay, softplus_decay

pytest.importorskip("triton")

from deltazoo.ops.fused import gates, sigmoid_gate  # noqa: E402


@dataclass(frozen=True)
class Decay(Case):
    """The decay gate and its gradients; small steps, as models start with, and large ones."""

    shape: tuple[int, ...] = (2, 7, 3, 12)
    most_parts: int = 512
    one_part: int = 0
    saturating: bool = False

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        draw = self.drawing(device, dtype)
        heads, channels = self.shape[2], torch.Size(self.shape[2:]).numel()
        a, A_log = draw(*self.shape), draw(heads, given=torch.float32)
        dt_bias = 8 * draw(channels, given=torch.float32)
        inputs = [x.requires_grad_() for x in (a, A_log, dt_bias)]
        gate = saturating_decay if self.saturating else softplus_decay
        log_decay = log_decay_of(gate, *inputs, fused=fused)
        with mock.patch.multiple(gates, _MOST_PARTS=self.most_parts, _ONE_PART=self.one_part):
            gradients = torch.autograd.grad(log_decay, inputs, draw(*self.shape, given=torch.float32))
        names = ("d_a", "d_A_log", "d_dt_bias")
        return {"log_decay": log_decay.detach(), **dict(zip(names, gradients, strict=True))}


@dataclass(frozen=True)
class Gate(Case):
    """The gate per channel and its gradients."""

    shape: tuple[int, ...] = (2, 5, 3, 12)
    around: float = 0.0
    largest: float = 1.0
    root: bool = False
    gate_dtype: torch.dtype | None = None

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        draw = self.drawing(device, dtype)
        gate, x, d_y = draw(*self.shape, given=self.gate_dtype, scale=2), draw(*self.shape), draw(*self.shape)
        gate += self.around
        y = sigmoid_gate(gate.requires_grad_(), x.requires_grad_(), self.largest, root=self.root, fused=fused)
        d_gate, d_x = torch.autograd.grad(y, [gate, x], d_y)
        return {"y": y.detach(), "d_gate": d_gate, "d_x": d_x}


CASES: list[Case] = [
    Decay("decay"),
    Decay("decay_in_one_part", shape=(2, 260, 12), one_part=8192),
    Decay("decay_per_head", shape=(3, 50, 5)),
    Decay("decay_wide", shape=(1, 9, 3, 700)),
    Decay("decay_several_blocks_per_program", shape=(2, 700, 2, 8), most_parts=2),
    Decay("decay_half", dtype=HALF),
    Decay("saturating_decay", saturating=True),
    Decay("saturating_decay_several_blocks", shape=(2, 700, 2, 8), most_parts=2, saturating=True),
    Decay("saturating_decay_half", dtype=HALF, saturating=True),
    Gate("gate"),
    Gate("gate_doubled", largest=2.0, shape=(3, 1000, 7)),
    Gate("gate_root", root=True, largest=2.0),
    *(
        Gate(f"gate{'_root' * root}_around_{around:g}", around=around, root=root)
        for around in (-100, -40, -12, 12, 40)
        for root in (False, True)
    ),
    Gate("gate_half", dtype=HALF),
    Gate("gate_half_around_-8", dtype=HALF, around=-8),
    Gate("gate_half_around_8", dtype=HALF, around=8),
    Gate("gate_root_half", dtype=HALF, root=True, largest=0.5),
    Gate("gate_wider_than_its_values", dtype=HALF, gate_dtype=torch.float32),
]


def test_gates_that_do_not_fit() -> None:
    x = torch.ones(2, 5, 3, 8, device="meta")
    with pytest.raises(ValueError, match=r"one shape, got \(2, 5, 3, 4\) and \(2, 5, 3, 8\)"):
        sigmoid_gate(x[..., :4], x, fused=True)
    with pytest.raises(NotImplementedError, match=r"not torch\.float64"):
        sigmoid_gate(x.double(), x, fused=True)


def check_operators() -> None:
    x = torch.randn(2, 5, 3, 8)
    opcheck(
        (gates._sigmoid_gate, x, x.flip(0), 2.0, True),
        (gates._softplus_decay, x, x[0, 0, :, 0], x[0, 0].flatten(), True),
    )
