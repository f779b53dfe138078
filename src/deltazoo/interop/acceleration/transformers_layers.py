"""The delta-rule layers of transformers, and how each arranges its projections: one short function per arrangement.

The functions call the model's own modules, so adapters, quantised weights and hooks on them act.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deltazoo.ops.decay import softplus_decay

__all__ = ["LAYER_ARRANGEMENTS", "LayerArrangement", "Projections", "arrangement_of"]


class Projections(NamedTuple):
    """Projections of a layer's input, before the convolution."""

    qkv: Tensor
    """`[B, T, C]`: q, k and v side by side."""
    step_gate: Tensor
    """`[B, T, HV]`: logit of the step size."""
    log_decay: Tensor
    """`[B, T, HV]`, or `[B, T, H, K]` with one decay per key channel."""
    output_gate: Tensor
    """`[B, T, HV, V]`, before its activation."""


@dataclass(frozen=True)
class LayerArrangement:
    """How one layer class of transformers arranges its projections."""

    family: str
    """The model's folder in transformers, which is also its model type."""
    variant: str
    """The registered variant whose rule it computes."""
    project: Callable[[Any, Tensor], Projections]
    norm: str = "o_norm"
    """The gated norm's name in the layer."""
    output: str = "o_proj"
    """The output projection's."""


def _separate(layer: Any, x: Tensor) -> Projections:
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=-1)
    log_decay = softplus_decay(layer.a_proj(x), layer.A_log, layer.dt_bias)
    return Projections(qkv, layer.b_proj(x), log_decay, _heads(layer.g_proj(x), layer.head_v_dim))


def _fused_by_key_head(layer: Any, x: Tensor) -> Projections:
    parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    q, k, v, output_gate, step_gate, a = parts
    qkv = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1)
    return Projections(qkv, step_gate, softplus_decay(a, layer.A_log, layer.dt_bias), output_gate)


def _fused_qkv(layer: Any, x: Tensor) -> Projections:
    log_decay = softplus_decay(layer.in_proj_a(x), layer.A_log, layer.dt_bias)
    output_gate = _heads(layer.in_proj_z(x), layer.head_v_dim)
    return Projections(layer.in_proj_qkv(x), layer.in_proj_b(x), log_decay, output_gate)


def _kda(layer: Any, x: Tensor) -> Projections:
    return _kda_with(layer, x, layer.g_b_proj(layer.g_a_proj(x)))


def _kda_with_full_gate(layer: Any, x: Tensor) -> Projections:
    return _kda_with(layer, x, layer.g_proj(x))


def _kda_with(layer: Any, x: Tensor, output_gate: Tensor) -> Projections:
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=-1)
    return Projections(qkv, layer.b_proj(x), layer.forget_gate(x), _heads(output_gate, layer.head_dim))


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim))


_QWEN = {"norm": "norm", "output": "out_proj"}

LAYER_ARRANGEMENTS: Mapping[str, LayerArrangement] = {
    "Qwen3NextGatedDeltaNet": LayerArrangement("qwen3_next", "gated_deltanet", _fused_by_key_head, **_QWEN),
    "Qwen3_5GatedDeltaNet": LayerArrangement("qwen3_5", "gated_deltanet", _fused_qkv, **_QWEN),
    "Qwen3_5MoeGatedDeltaNet": LayerArrangement("qwen3_5_moe", "gated_deltanet", _fused_qkv, **_QWEN),
    "Qwen4ExpTextGatedDeltaNet": LayerArrangement("qwen4_exp", "gated_deltanet", _fused_qkv, **_QWEN),
    "OlmoHybridGatedDeltaNet": LayerArrangement("olmo_hybrid", "gated_deltanet", _separate),
    "KimiLinearDeltaAttention": LayerArrangement("kimi_linear", "kda", _kda),
    "Glm5NextTextLinearAttention": LayerArrangement("glm5_next", "kda", _kda),
    "BailingHybridDeltaAttention": LayerArrangement("bailing_hybrid", "kda", _kda_with_full_gate),
}
"""By class name: the delta-rule layers of transformers, whichever of them the installed version has."""


def arrangement_of(cls: type[nn.Module]) -> LayerArrangement | None:
    """The arrangement of exactly this class of transformers; None for any other, also for a subclass."""
    known = LAYER_ARRANGEMENTS.get(cls.__name__)
    if known is None or cls.__module__ != f"transformers.models.{known.family}.modeling_{known.family}":
        return None
    return known
