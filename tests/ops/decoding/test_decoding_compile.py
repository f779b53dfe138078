"""The kernels of a decoding step compiled for a Hopper card, without having one: registers, and that none spill."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ops.launched_kernels import check_registers, compile_launches, empty  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402

from deltazoo.layers import RMSNorm  # noqa: E402
from deltazoo.ops.decoding import (  # noqa: E402
    between_products,
    convolution,
    greedy_token,
    gumbel_scores,
    low_rank_maps,
    product,
    row_product,
    rule,
    scaled_keys,
)
from deltazoo.ops.decoding.step_form import RuleShape  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="with TRITON_INTERPRET=1 Triton cannot compile"
)


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


def second_maps(mixed: Tensor, maps: list[low_rank_maps.LowRankGate]) -> Tensor:
    """The maps' outputs, for several rows beside convolutions."""
    if len(mixed) == 1:
        return low_rank_maps.low_rank_gates(mixed, maps)
    _, gates = convolution.convolve_parts(empty(2, *mixed.shape), convolution_of(len(mixed)), gates=maps)
    assert gates is not None
    return gates


def apply_channel_rule(rows: int) -> None:
    """The step of KDA from its gates of low rank on."""
    shape = RuleShape(8, 8, 128, 128, True, False, "channel", "sigmoid", True)
    wide = torch.float32
    mixed, weight = empty(rows, 3 * 1024 + 256 + 8, dtype=wide), empty(1024, 128)
    gate, decay = low_rank_maps.LowRankGate(3072, weight, empty(1024)), low_rank_maps.LowRankGate(3200, weight)
    gates = second_maps(mixed, [gate, decay])
    state, A_log, dt_bias = (empty(*shape, dtype=wide) for shape in ((rows, 8, 128, 128), (8,), (1024,)))
    rule.token_rule(mixed, gates, state, A_log, dt_bias, empty(128), shape)


def apply_log_sigmoid_rule(rows: int) -> None:
    """The step of GLA with its heads, from its decay's second map on."""
    shape = RuleShape(4, 4, 256, 512, False, False, "channel", "silu", False, False, "none", "log_sigmoid")
    wide = torch.float32
    mixed = empty(rows, 2 * 1024 + 2 * 2048 + 16, dtype=wide)
    gates = second_maps(mixed, [low_rank_maps.LowRankGate(6144, empty(1024, 16), empty(1024))])
    rule.token_rule(mixed, gates, empty(rows, 4, 256, 512, dtype=wide), None, None, empty(512), shape)


def apply_erase_first_rule(rows: int) -> None:
    """The step of EDA from its maps of low rank on."""
    shape = RuleShape(
        8, 8, 128, 128, True, False, "channel", "sigmoid", True, decay_form="saturating", keys="erase_first"
    )
    wide, weight = torch.float32, empty(1024, 128)
    mixed = empty(rows, 3 * 1024 + 3 * 128 + 16, dtype=wide)
    gates = second_maps(
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


def draw() -> None:
    wide, whole = empty(4, 1, dtype=torch.float32), empty(4, 1, dtype=torch.int64)
    gumbel_scores.gumbel_scores(empty(4, 32000), empty(4, 1), wide, whole, whole)


CALLS: dict[str, tuple[int, Callable[[], None]]] = {
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
    "step_drawn": (4, draw),
}
"""Blocks of four warps that a multiprocessor has registers for, at least, and the call."""


def compile_call(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompiledKernel]:
    count = 2 if name.startswith("step_rule_channel") else 1  # its gates first
    return compile_launches(CALLS[name][1], count, monkeypatch)


@pytest.mark.parametrize("name", CALLS)
def test_registers_and_spills(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a kernel that starts ahead writes nothing before it has waited, on whatever Triton makes of the wait."""
    for compiled in compile_call(name, monkeypatch):
        check_registers(compiled, CALLS[name][0])
        ahead, *waited = compiled.asm["ptx"].split("griddepcontrol.wait")
        assert not waited or not re.search(r"\b(st|red|atom)\.global", ahead), compiled.name
