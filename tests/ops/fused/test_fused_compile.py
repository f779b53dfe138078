"""The fused kernels compiled for a Hopper card, without having one: registers, and that none spill."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

triton = pytest.importorskip("triton")

from ops.launched_kernels import check_registers, compile_launches, empty  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402

from deltazoo.ops.fused import MOST_COLUMNS, gates, glu, loss, norms, rotary, short_conv_kernels, short_conv_step  # noqa: E402
from deltazoo.ops.fused import keys as rule_keys  # noqa: E402
from deltazoo.ops.fused import moment as moment_keys  # noqa: E402
from deltazoo.ops.fused import scan as token_scan  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="with TRITON_INTERPRET=1 Triton cannot compile"
)


def convolve(
    head_dim: int, packed: bool = False, has_past: bool = False, tokens: int = 32768, taps: int = 4, silu: bool = True
) -> None:
    x, weight = empty(1, tokens, 1024), empty(1024, taps, dtype=torch.float32)
    where = (empty(tokens, dtype=torch.int64), empty(4, dtype=torch.int32)) if packed else (None, None)
    past = empty(3 if packed else 1, 1024, taps - 1) if has_past else None
    arguments = x, None, None, weight, None, None, past, *where, silu, head_dim, True
    short_conv_kernels._forward(*arguments)
    short_conv_kernels._backward(*arguments, x, None, None)


def convolve_three(head_dim: int, packed: bool = False) -> None:
    inputs = empty(1, 32768, 1024), empty(1, 32768, 1024), empty(1, 32768, 2048)
    weights = [empty(x.shape[2], 4, dtype=torch.float32) for x in inputs]
    where = (empty(32768, dtype=torch.int64), empty(4, dtype=torch.int32)) if packed else (None, None)
    arguments = *inputs, *weights, None, *where, True, head_dim, not head_dim
    short_conv_kernels._forward(*arguments)
    short_conv_kernels._backward(*arguments, *inputs)


def step(head_dim: int, rows: int, inplace: bool, kept: int = 3, silu: bool = True) -> None:
    weights = (empty(1024, 4), empty(1024, 4), empty(2048, 4))
    inputs = empty(rows, 1, 5128).split([1024, 1024, 2048, 1032], dim=-1)[:3]
    run = short_conv_step._in_place if inplace else short_conv_step._functional
    run(*inputs, *weights, empty(rows, 4096, kept), silu, head_dim, head_dim)


def normalize(head_dim: int, silu: bool) -> None:
    x, weight = empty(4, 4096, 8, head_dim), empty(head_dim, dtype=torch.float32)
    norms._gated_forward(x, x, weight, 1e-5, silu)
    norms._gated_backward(x, x, weight, 1e-5, silu, x)


def normalize_heads(head_dim: int, tokens: int = 4096) -> None:
    """The L2 norm as layers call it that rotate queries and keys before it."""
    x = empty(4, tokens, 8, head_dim)
    norms._l2_forward(x, 1e-6)
    norms._l2_backward(x, 1e-6, x)


def normalize_plainly(D: int, stream: torch.dtype | None = None) -> None:
    """The norm as blocks call it: without a residual, or with one in this dtype; the result in bfloat16."""
    x, weight = empty(4, 4096, D), empty(D, dtype=stream or torch.bfloat16)
    if stream is None:
        norms._rms_forward(x, weight, 1e-5, x.dtype)
        norms._rms_backward(x, weight, 1e-5, x.dtype, x)
    else:
        y, total = norms._add_forward(x, empty(4, 4096, D, dtype=stream), weight, 1e-5, x.dtype)
        norms._sum_backward(total, weight, 1e-5, y, total, x.dtype)


def multiply() -> None:
    gate = empty(4, 4096, 2816)
    glu._forward(gate, gate)
    glu._backward(gate, gate, gate)


def multiply_and_map() -> None:
    x, weight = empty(4, 4096, 1024), empty(2816, 1024)
    weights = weight, weight, empty(1024, 2816)
    _, gate, up = glu._mlp_forward(x, *weights)
    glu._mlp_backward(x, gate, up, *weights, x)


def decay(*heads: int, saturating: bool = False) -> None:
    a, A_log, dt_bias = (
        empty(4, 4096, *heads),
        *(empty(size, dtype=torch.float32) for size in (heads[0], torch.Size(heads).numel())),
    )
    gates._decay_forward(a, A_log, dt_bias, saturating)
    gates._decay_backward(a, A_log, dt_bias, saturating, empty(4, 4096, *heads, dtype=torch.float32))


def gate(root: bool) -> None:
    x = empty(4, 4096, 8, 128)
    gates._gate_forward(x, x, 2.0, root)
    gates._gate_backward(x, x, 2.0, root, x)


def make_keys(keys: str, K: int) -> None:
    x, p = empty(4, 4096, 8, K), empty(8, dtype=torch.float32)
    given = {"query_share": (empty(4, 4096, 8), None, None), "gated_query": (x, p, None)}.get(keys, (None, p, p))
    made = rule_keys._keys_forward(x, x, *given, keys, 1.0)
    rule_keys._keys_backward(x, x, *given, keys, 1.0, *made)


def sum_up(channels: int) -> None:
    x, log_decay = empty(4, 4096, 8, channels, dtype=torch.float32), empty(4, 4096, 8, dtype=torch.float32)
    moment_keys._sum_forward(x, log_decay)
    moment_keys._sum_backward(x, log_decay, x)


def scan_tokens(channels: int, *, damped: bool = True, dtype: torch.dtype = torch.float32) -> None:
    x, start = empty(4, 4096, channels, dtype=dtype), empty(4, channels, dtype=torch.float32)
    decay, damping = (x, x) if damped else (x[..., :1].contiguous(), None)
    token_scan._forward(decay, x, damping, start, None)
    token_scan._backward(decay, x, damping, x, None, x, start)


def weigh_squares() -> None:
    k, step = empty(4, 4096, 8, 128), empty(4, 4096, 8)
    moment_keys._squares_backward(step, k, moment_keys._squares_forward(step, k))


def measure_keys() -> None:
    k = empty(4, 4096, 8, 128)
    rule_keys._norm_backward(k, rule_keys._products(k))
    rule_keys._products(k, k)


def scale_key() -> None:
    k, moment, scale = (
        empty(4, 4096, 8, 128),
        empty(4, 4096, 8, 128, dtype=torch.float32),
        empty(8, dtype=torch.float32),
    )
    moment_keys._scaled_backward(moment, scale, k, moment_keys._scaled_forward(moment, scale, k))


def turn(heads: int, channels: int = 128) -> None:
    x, angles = empty(4, 4096, heads, 128), empty(1, 4096, channels, dtype=torch.float32)
    rotary._turn(x, angles, angles, False)
    rotary._turn(x, angles, angles, True)


def lose() -> None:
    loss._cross_entropy(empty(2048, 32000), empty(2048, dtype=torch.int64), torch.float32, fused=True)


CALLS: dict[str, tuple[int, Callable[[], None]]] = {
    "conv": (4, lambda: convolve(0)),
    "conv_heads_64": (4, lambda: convolve(64)),
    "conv_heads_128": (4, lambda: convolve(128)),
    "conv_heads_256": (4, lambda: convolve(256)),
    "conv_past": (4, lambda: convolve(128, has_past=True)),
    "conv_one_token": (4, lambda: convolve(128, has_past=True, tokens=1)),
    "conv_one_tap": (4, lambda: convolve(0, taps=1)),
    "conv_bare_sum": (4, lambda: convolve(0, silu=False)),
    "conv_of_three": (4, lambda: convolve_three(128)),
    "conv_of_three_without_heads": (4, lambda: convolve_three(0)),
    "conv_of_three_packed": (3, lambda: convolve_three(128, packed=True)),
    "conv_packed": (3, lambda: convolve(128, packed=True)),
    "conv_packed_past": (2, lambda: convolve(128, packed=True, has_past=True)),
    "step": (8, lambda: step(128, 1, inplace=True)),
    "step_rows": (8, lambda: step(64, 64, inplace=False)),
    "step_without_norm": (8, lambda: step(0, 64, inplace=True)),
    "step_bare_sum": (8, lambda: step(0, 64, inplace=True, silu=False)),
    "step_longer_window": (8, lambda: step(128, 1, inplace=True, kept=4)),
    "norm_silu_128": (4, lambda: normalize(128, True)),
    "norm_sigmoid_256": (4, lambda: normalize(256, False)),
    "plain_norm_128": (8, lambda: normalize_plainly(128)),
    "plain_norm_1024": (8, lambda: normalize_plainly(1024)),
    "plain_norm_2048": (8, lambda: normalize_plainly(2048)),
    "plain_norm_sum_1024": (8, lambda: normalize_plainly(1024, torch.bfloat16)),
    "plain_norm_sum_2048": (8, lambda: normalize_plainly(2048, torch.bfloat16)),
    "plain_norm_autocast_1024": (8, lambda: normalize_plainly(1024, torch.float32)),
    "l2_norm_128": (8, lambda: normalize_heads(128)),
    "l2_norm_one_token": (8, lambda: normalize_heads(128, 1)),
    "decay": (5, lambda: decay(8, 128)),
    "decay_per_head": (4, lambda: decay(16)),
    "decay_saturating": (4, lambda: decay(8, 128, saturating=True)),
    **{
        f"keys_{keys}_{K}": (4, partial(make_keys, keys, K))
        for keys, K in (("query_share", 128), ("gated_query", 128), ("feedback", 256), ("unit_feedback", 256))
    },
    "moment_sum": (2, lambda: sum_up(128)),
    "moment_sum_256": (1, lambda: sum_up(256)),
    "scan": (3, lambda: scan_tokens(1024)),
    "scan_per_head": (3, lambda: scan_tokens(16)),
    "scan_of_the_token_before": (4, lambda: scan_tokens(1024, damped=False, dtype=torch.bfloat16)),
    "moment_squares": (8, weigh_squares),
    "key_products": (8, measure_keys),
    "moment_key": (8, scale_key),
    "gate": (8, lambda: gate(False)),
    "gate_root": (8, lambda: gate(True)),
    "plain_norm_longest": (4, lambda: normalize_plainly(MOST_COLUMNS, torch.float32)),
    "swiglu": (8, multiply),
    "swiglu_and_linear_map": (8, multiply_and_map),
    "rotary": (4, lambda: turn(5)),
    "rotary_of_some_channels": (4, lambda: turn(16, 32)),
    "rotary_of_few_channels": (4, lambda: turn(32, 8)),
    "loss": (8, lose),
}
"""Blocks of four warps that a multiprocessor has registers for, at least, and the call."""


def launches_of(name: str) -> int:
    """Forward and backward, and the sum of parts of a weight's gradient, or the erase gain."""
    if name.startswith(("step", "loss")):
        return 1
    if name == "conv_one_token":  # one program along the tokens: its part is the sum
        return 2
    return 3 if name.startswith(("conv", "plain_norm", "decay", "key_products")) else 2


def compile_call(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompiledKernel]:
    return compile_launches(CALLS[name][1], launches_of(name), monkeypatch)


NORMS = [f"plain_norm_{case}" for case in ("1024", "2048", "sum_1024", "sum_2048", "autocast_1024")]


@pytest.mark.parametrize("name", ["swiglu", "swiglu_and_linear_map", "rotary", *NORMS])
def test_reads_and_writes_16_bytes_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for compiled in compile_call(name, monkeypatch):
        if compiled.metadata.name == "sum_of_parts_kernel":  # its rows are two megabytes in all
            continue
        accesses = re.findall(r"(?:ld|st)\.global\S*", compiled.asm["ptx"])
        narrow = [access for access in accesses if ".v4.b32" not in access]
        # 1024 weights in bfloat16 are 8 bytes for each of 256 threads, and so are the angles of 4 tokens for 128.
        few = {"plain_norm_1024": 1, "plain_norm_sum_1024": 1, "rotary": 4}
        allowed = ["ld.global.v2.b32"] * few.get(name, 0)
        assert accesses and narrow == allowed, (compiled.name, accesses)


@pytest.mark.parametrize("name", CALLS)
def test_registers_and_spills(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for compiled in compile_call(name, monkeypatch):
        # One register, or an address, stored before the loop and read after it.
        waits = 8 if name in ("conv_of_three_packed", "scan") else 0
        check_registers(compiled, CALLS[name][0], stack=waits)
