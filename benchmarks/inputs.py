"""Random inputs of the timed calls; what a layer does before the operator (norms, gates) is not timed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operator_options import GATES, OPERATORS, UNEVEN, Operator
from benchmarks.shapes import Shape

__all__ = ["Inputs", "gate_means", "make_inputs"]


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call and the gradient of its output; see `delta_rule` for the shapes.

    `erase_gate` `[B, T, H, K]` and `write_gate` `[B, T, H, V]` are those of Gated DeltaNet-2.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_decay: Tensor | None
    d_output: Tensor
    erase_key: Tensor | None = None
    erase_gate: Tensor | None = None
    write_gate: Tensor | None = None

    def leaves(self, op: str) -> list[Tensor]:
        """The tensors that need a gradient."""
        if op == "softmax":
            return [self.q, self.k, self.v]
        others = (self.beta, self.log_decay, self.erase_key, self.erase_gate, self.write_gate)
        return [self.q, self.k, self.v, *(x for x in others if x is not None and x.requires_grad)]


def gate_means(gates: str, count: int) -> Tensor:
    """Mean log-decays `[count]` per token of neighbouring channels or heads."""
    if gates in GATES:
        return torch.full((count,), GATES[gates])
    first, last = (math.log(-mean) for mean in UNEVEN)
    return -torch.linspace(first, last, count).exp()


def make_inputs(shape: Shape, op: str, gates: str, *, device: str, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Unit-length q and k, normal v, float32 beta = sigmoid(normal) and float32 gates of the wanted strength.

    An erase key is the key times numbers uniform in [0, 1]; the gates of Gated DeltaNet-2 are such numbers.
    """
    B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V
    operator = OPERATORS.get(op, Operator())
    S = T * operator.num_micro_steps
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=device)

    def unit_rows(rows: int) -> Tensor:
        return F.normalize(normal(B, rows, H, K), dim=-1).to(dtype).requires_grad_()

    log_decay = None
    if gates != "none":
        size = (B, T, HV, K) if operator.decay == "channel" else (B, T, HV)
        log_decay = (2 * gate_means(gates, size[-1]).to(device) * uniform(*size)).requires_grad_()
    elif operator.decay == "fixed":
        log_decay = (-8 / HV * torch.arange(HV, device=device)).expand(B, T, HV).contiguous()
    inputs = Inputs(
        q=unit_rows(T),
        k=unit_rows(S),
        v=normal(B, S, HV, V).to(dtype).requires_grad_(),
        beta=normal(B, S, HV).sigmoid().requires_grad_(),
        log_decay=log_decay,
        d_output=normal(B, T, HV, V).to(dtype),
    )
    if not operator.corrects:
        return replace(inputs, beta=None)
    if operator.erase_key:
        return replace(inputs, erase_key=(inputs.k.detach() * uniform(B, S, H, K)).to(dtype).requires_grad_())
    if operator.gated:
        b, w = (uniform(B, T, H, size).to(dtype).requires_grad_() for size in (K, V))
        return replace(inputs, beta=torch.ones(B, T, H, device=device), erase_gate=b, write_gate=w)
    return inputs
