"""The fused kernels compiled for a Hopper card, without having one: registers, and that none spill.

The launches are recorded by running the operators on meta tensors, so what is compiled here is what a call launches.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, CompiledKernel  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from deltazoo.layers import RMSNorm  # noqa: E402
from deltazoo.ops.decoding import (  # noqa: E402
    between_products,
    convolution,
    greedy_token,
    launch_ahead,
    low_rank_maps,
    product,
    row_product,
    rule,
    scaled_keys,
)
from deltazoo.ops.decoding.step_form import RuleShape  # noqa: E402
from deltazoo.ops.fused import MOST_COLUMNS, gates, glu, loss, norms, rotary, short_conv, short_conv_step  # noqa: E402
from deltazoo.ops.fused import keys as rule_keys  # noqa: E402
from deltazoo.ops.fused import moment as moment_keys  # noqa: E402
from deltazoo.ops.triton import launch  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="with TRITON_INTERPRET=1 Triton cannot compile"
)

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def convolve(
    head_dim: int, packed: bool = False, has_past: bool = False, tokens: int = 32768, taps: int = 4, silu: bool = True
) -> None:
    x, weight = empty(1, tokens, 1024), empty(1024, taps, dtype=torch.float32)
    where = (empty(tokens, dtype=torch.int64), empty(4, dtype=torch.int32)) if packed else (None, None)
    past = empty(3 if packed else 1, 1024, taps - 1) if has_past else None
    short_conv._forward(x, weight, past, *where, silu, head_dim)
    short_conv._backward(x, weight, past, *where, silu, head_dim, x)


def convolve_three(head_dim: int, packed: bool = False) -> None:
    inputs = empty(1, 32768, 1024), empty(1, 32768, 1024), empty(1, 32768, 2048)
    weights = [empty(x.shape[2], 4, dtype=torch.float32) for x in inputs]
    where = (empty(32768, dtype=torch.int64), empty(4, dtype=torch.int32)) if packed else (None, None)
    short_conv._forward_three(*inputs, *weights, *where, True, head_dim, head_dim, 0)
    short_conv._backward_three(*inputs, *weights, *where, True, head_dim, head_dim, 0, *inputs)


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
    gate, weight = empty(4, 4096, 2816), empty(1024, 2816)
    glu._linear_forward(gate, gate, weight)
    glu._linear_backward(gate, gate, weight, empty(4, 4096, 1024))


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


def weigh_squares() -> None:
    k, step = empty(4, 4096, 8, 128), empty(4, 4096, 8)
    moment_keys._squares_backward(step, k, moment_keys._squares_forward(step, k))


def measure_keys() -> None:
    k = empty(4, 4096, 8, 128)
    rule_keys._norm_backward(k, rule_keys._norm_forward(k))
    rule_keys._gain(k, k)


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


def normalize_and_map() -> None:
    x, weight, linear = empty(4, 4096, 8, 128), empty(128), empty(1024, 1024)
    norms._linear_forward(x, weight, linear, 1e-5)
    norms._linear_backward(x, weight, linear, 1e-5, empty(4, 4096, 1024))


def lose() -> None:
    loss._cross_entropy(empty(2048, 32000), empty(2048, dtype=torch.int64), torch.float32, fused=True)


def convolution_of(rows: int) -> convolution.Convolution:
    return convolution.Convolution((empty(1024, 4), empty(1024, 4), empty(1024, 4)), empty(rows, 3072, 3))


def token_of(part: str) -> None:
    """The products of one row in a 374 M model."""
    x, norm = empty(1, 1024), {"norm_weight": empty(1024), "norm_eps": 1e-5}
    weight = {part: empty(3080, 1024) for part in ("mixer", "swapped")} | {
        "o": empty(1024, 1024),
        "mlp": empty(5632, 1024),
        "down": empty(1024, 2816),
    }
    wide = torch.float32
    if part in ("mixer", "swapped"):
        options = {"convolution": convolution_of(1), "dtype": wide}
        if part == "swapped":
            options |= {"convolution": convolution_of(1)._replace(silu=False), "bias": empty(3080)}
        product.token_product(x, weight[part], **norm, **options)  # type: ignore[arg-type]
    elif part == "o":
        heads = between_products.HeadNorm(empty(1, 8, 8, dtype=wide), 128, 1e-5)
        product.token_product(empty(1, 1024, dtype=wide), weight[part], head_norm=heads, residual=x)
    elif part == "mlp":
        product.token_product(x, weight[part], **norm, glu=True)  # type: ignore[arg-type]
    else:
        product.token_product(empty(1, 2816), weight[part], residual=x)


def apply_rule(rows: int, gate: str, V: int, **more: Any) -> None:
    """The step of a rule with 8 heads; its columns of `mixed` do not matter here."""
    shape = RuleShape(8, 8, 128, V, True, False, "none" if gate == "none" else "scalar", gate)
    shape, wide = shape._replace(**more), torch.float32
    A_log = empty(8, dtype=wide)
    dt_bias = None if shape.decay_form == "fixed" else A_log
    gates = empty(rows, 1024, dtype=wide) if shape.keys == "erase_first" else None
    write_keys = empty(rows, 8, 128, dtype=wide) if shape.keys == "scaled" else None
    parameters = [A_log] * {"gated_query": 1, "feedback": 2, "unit_feedback": 2}.get(shape.keys, 0)
    mixed, state = empty(rows, 8192, dtype=wide), empty(rows, 8, 128, V, dtype=wide)
    angles = (empty(rows, shape.turned), empty(rows, shape.turned)) if shape.turned else None
    rule.token_rule(mixed, gates, state, A_log, dt_bias, empty(V), shape, parameters, write_keys, angles)


def apply_channel_rule(rows: int) -> None:
    """The step of KDA from its gates of low rank on."""
    shape = RuleShape(8, 8, 128, 128, True, False, "channel", "sigmoid", True)
    wide = torch.float32
    mixed, weight = empty(rows, 3 * 1024 + 256 + 8, dtype=wide), empty(1024, 128)
    gate, decay = low_rank_maps.LowRankGate(3072, weight, empty(1024)), low_rank_maps.LowRankGate(3200, weight)
    gates = low_rank_maps.low_rank_gates(mixed, [gate, decay])
    state, A_log, dt_bias = (empty(*shape, dtype=wide) for shape in ((rows, 8, 128, 128), (8,), (1024,)))
    rule.token_rule(mixed, gates, state, A_log, dt_bias, empty(128), shape)


def apply_log_sigmoid_rule(rows: int) -> None:
    """The step of GLA with its heads, from its decay's second map on."""
    shape = RuleShape(4, 4, 256, 512, False, False, "channel", "silu", False, False, "none", "log_sigmoid")
    wide = torch.float32
    mixed = empty(rows, 2 * 1024 + 2 * 2048 + 16, dtype=wide)
    gates = low_rank_maps.low_rank_gates(mixed, [low_rank_maps.LowRankGate(6144, empty(1024, 16), empty(1024))])
    rule.token_rule(mixed, gates, empty(rows, 4, 256, 512, dtype=wide), None, None, empty(512), shape)


def apply_erase_first_rule(rows: int) -> None:
    """The step of EDA from its maps of low rank on."""
    shape = RuleShape(
        8, 8, 128, 128, True, False, "channel", "sigmoid", True, decay_form="saturating", keys="erase_first"
    )
    wide, weight = torch.float32, empty(1024, 128)
    mixed = empty(rows, 3 * 1024 + 3 * 128 + 16, dtype=wide)
    gates = low_rank_maps.low_rank_gates(
        mixed,
        [
            low_rank_maps.LowRankGate(first, weight, bias)
            for first, bias in ((3072, empty(1024)), (3200, None), (3328, None))
        ],
    )
    state, A_log, dt_bias = (empty(*shape, dtype=wide) for shape in ((rows, 8, 128, 128), (8,), (1024,)))
    rule.token_rule(mixed, gates, state, A_log, dt_bias, empty(128), shape)


def scale_keys(rows: int) -> None:
    parameters = [empty(8, dtype=torch.float32)] * 3
    mixed, moment = empty(rows, 8192, dtype=torch.float32), empty(rows, 8, 1, 128, dtype=torch.float32)
    scaled_keys.scaled_keys(mixed, moment, parameters, 4096, 4104)


def add(parts: int) -> None:
    between_products.add_parts(
        empty(parts, 64, 1024, dtype=torch.float32), empty(64, 1024), RMSNorm(1024).to("meta", torch.bfloat16)
    )


def choose() -> None:
    rows = torch.empty(4, 1, device="meta", dtype=torch.bool)
    greedy_token.greedy_token(empty(4, 32000), empty(1, dtype=torch.int64), rows, 0, empty(4, 1, dtype=torch.int64))


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
    "plain_norm_and_linear_map": (8, normalize_and_map),
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
    **{f"step_token_{part}": (3, partial(token_of, part)) for part in ("mixer", "swapped", "o", "mlp", "down")},
    **{
        f"step_rule_{gate}_{rows}_{V}": (2, partial(apply_rule, rows, gate, V))
        for gate, rows, V in (("none", 1, 128), ("silu", 1, 256), ("silu", 64, 128))
    },
    **{
        f"step_rule_step_{step}": (2, partial(apply_rule, 1, "silu", 128, step=step, normalize_k=False))
        for step in ("none", "exact")
    },
    **{f"step_rule_channel_{rows}": (2, partial(apply_channel_rule, rows)) for rows in (1, 64)},
    **{f"step_rule_channel_log_sigmoid_{rows}": (2, partial(apply_log_sigmoid_rule, rows)) for rows in (1, 64)},
    **{f"step_rule_channel_erase_first_{rows}": (2, partial(apply_erase_first_rule, rows)) for rows in (1, 64)},
    "step_rule_fixed_decay": (2, lambda: apply_rule(1, "sigmoid", 128, step="none", decay_form="fixed")),
    **{
        f"step_rule_keys_{keys}": (2, partial(apply_rule, 64, "silu", 256, keys=keys))
        for keys in ("gated", "gated_query", "roots", "query_share", "feedback", "unit_feedback", "scaled")
    },
    **{
        f"step_rule_wide_{keys}": (
            2,
            partial(apply_rule, 64, "silu", 512, K=256, keys=keys, undecayed=keys == "feedback"),
        )
        for keys in ("feedback", "gated_query", "erase_first")
    },
    **{
        f"step_rule_turned_{rows}": (2, partial(apply_rule, rows, "silu", 128, normalize_k=True, turned=128))
        for rows in (1, 64)
    },
    "step_rule_doubled": (4, lambda: apply_rule(64, "silu", 128, doubled_step=True)),
    "step_rule_micro_steps": (2, lambda: apply_rule(64, "silu", 256, micro_steps=2)),
    "step_scaled_keys": (8, lambda: scale_keys(64)),
    **{
        f"step_rows_{rows}_{N}_{K}": (2, partial(row_product.row_product, empty(rows, K), empty(N, K)))
        for rows in (2, 64)
        for N, K in ((3080, 1024), (1024, 2816), (5632, 1024))
    },
    "step_convolution": (4, lambda: convolution.convolve_parts(empty(2, 64, 3080), convolution_of(64))),
    "step_convolution_bias": (
        4,
        lambda: convolution.convolve_parts(empty(2, 64, 3080), convolution_of(64)._replace(silu=False), empty(3080)),
    ),
    "step_add": (8, lambda: add(4)),
    "step_swiglu": (8, lambda: between_products.swiglu_parts(empty(2, 64, 5632), torch.bfloat16)),
    "step_greedy": (4, choose),
}
"""Blocks of four warps that a multiprocessor has registers for, at least, and the call."""


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers per thread, and bytes of local memory, where spilled registers go."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    text = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|LOCAL|STACK):(\d+)", text)}


def launches_of(name: str) -> int:
    """Forward and backward, and the sum of parts of a weight's gradient, or the erase gain."""
    if name.startswith("step_rule_channel"):
        return 2  # its gates first
    if name.startswith(("step", "loss")):
        return 1
    return 3 if name.startswith(("conv", "plain_norm", "decay", "key_products")) else 2


def compile_call(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompiledKernel]:
    """The kernels that a call launches, compiled as the launcher would."""
    launched: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel: JITFunction, grid: object) -> Callable[..., None]:
        return lambda *args, **options: launched.append((kernel, args, options))

    with monkeypatch.context() as patch:
        patch.setattr(launch, "DIRECT", False)
        patch.setattr(JITFunction, "__getitem__", record)
        patch.setattr(launch_ahead, "launches_ahead", lambda device: True)
        CALLS[name][1]()
    assert len(launched) == launches_of(name)
    for kernel, args, options in launched:
        compiled_with = {option: options.pop(option) for option in ("num_warps", "maxnreg") if option in options}
        options.pop("launch_pdl", None)
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        values = {parameter.name: given.pop(parameter.name) for parameter in kernel.params}
        assert not given
        constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr or values[p.name] is None}
        scalars = {n: "fp32" if isinstance(x, float) else "i32" for n, x in values.items()}
        signature = {
            n: "constexpr" if n in constants else f"*{TYPES[x.dtype]}" if isinstance(x, Tensor) else scalars[n]
            for n, x in values.items()
        }
        aligned = {
            (kernel.arg_names.index(n),): [["tt.divisibility", 16]]
            for n, x in values.items()
            if isinstance(x, Tensor) or is_specialized(kernel, n) and isinstance(x, int) and x % 16 == 0
        }
        source = ASTSource(kernel, signature, constants, aligned)
        yield triton.compile(source, target=HOPPER, options=compiled_with)


def is_specialized(kernel: JITFunction, name: str) -> bool:
    """Whether Triton compiles a version of its own for values of an argument that are multiples of 16."""
    parameter = kernel.params[kernel.arg_names.index(name)]
    return not parameter.is_constexpr and not parameter.do_not_specialize


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
def test_registers_and_spills(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocks, _ = CALLS[name]
    for compiled in compile_call(name, monkeypatch):
        found = resources(compiled.asm["cubin"], tmp_path)
        assert "f64" not in compiled.asm["ttir"], compiled.name  # as a constant that is no normal float32 makes it
        waits = 8 if name == "conv_of_three_packed" else 0  # one register, stored before the loop and read after it
        assert found["LOCAL"] == 0 and found["STACK"] <= waits, (compiled.name, found)
        assert found["REG"] <= 65536 // (128 * blocks), (compiled.name, found)
