"""The delta-rule layers of transformers, and how each arranges its projections: one short function per arrangement.

The functions call the model's own modules, so adapters, quantised weights and hooks act.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deltazoo.ops import fused


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
    """Arrangement of the projections in one layer class of transformers."""

    family: str
    """The model's folder in transformers, which is also its model type."""
    rule: str
    """The registered rule that the layer computes."""
    project: Callable[[Any, Tensor], Projections]
    inputs: tuple[str, ...]
    """Names of the linear maps of the layer's input."""
    norm: str = "o_norm"
    """Name of the gated norm in the layer."""
    output: str = "o_proj"
    """Name of the output projection in the layer."""


def _separate(layer: Any, x: Tensor) -> Projections:
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=-1)
    return Projections(qkv, layer.b_proj(x), _decay(layer, layer.a_proj(x)), _heads(layer.g_proj(x), layer.head_v_dim))


def _fused_by_key_head(layer: Any, x: Tensor) -> Projections:
    parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    q, k, v, output_gate, step_gate, a = parts
    qkv = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1)
    return Projections(qkv, step_gate, _decay(layer, a), output_gate)


def _fused_qkv(layer: Any, x: Tensor) -> Projections:
    output_gate = _heads(layer.in_proj_z(x), layer.head_v_dim)
    return Projections(layer.in_proj_qkv(x), layer.in_proj_b(x), _decay(layer, layer.in_proj_a(x)), output_gate)


def _decay(layer: Any, a: Tensor) -> Tensor:
    return fused.softplus_log_decay(a, layer.A_log, layer.dt_bias, fused=layer.deltazoo_fused_kernels)


def _kda(layer: Any, x: Tensor) -> Projections:
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=-1)
    gate = layer.g_proj(x) if hasattr(layer, "g_proj") else layer.g_b_proj(layer.g_a_proj(x))
    return Projections(qkv, layer.b_proj(x), layer.forget_gate(x), _heads(gate, layer.head_dim))


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim))


_FUSED_QKV = LayerArrangement(
    "qwen3_5",
    "gated_deltanet",
    _fused_qkv,
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    norm="norm",
    output="out_proj",
)
_KDA = LayerArrangement("kimi_linear", "kda", _kda, ("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj"))

LAYER_ARRANGEMENTS: Mapping[str, LayerArrangement] = {
    "Qwen3NextGatedDeltaNet": replace(
        _FUSED_QKV, family="qwen3_next", project=_fused_by_key_head, inputs=("in_proj_qkvz", "in_proj_ba")
    ),
    "Qwen3_5GatedDeltaNet": _FUSED_QKV,
    "Qwen3_5MoeGatedDeltaNet": replace(_FUSED_QKV, family="qwen3_5_moe"),
    "Qwen4ExpTextGatedDeltaNet": replace(_FUSED_QKV, family="qwen4_exp"),
    "LaraMiniGatedDeltaNet": replace(_FUSED_QKV, family="lara_mini"),
    "OlmoHybridGatedDeltaNet": LayerArrangement(
        "olmo_hybrid", "gated_deltanet", _separate, ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")
    ),
    "KimiLinearDeltaAttention": _KDA,
    "Glm5NextTextLinearAttention": replace(_KDA, family="glm5_next"),
    "BailingHybridDeltaAttention": replace(
        _KDA, family="bailing_hybrid", inputs=("q_proj", "k_proj", "v_proj", "b_proj", "g_proj")
    ),
}
"""The delta-rule layers of transformers by class name, those that the installed version has."""


def arrangement_of(cls: type[nn.Module]) -> LayerArrangement | None:
    """The arrangement of a class of transformers; None for any other class, also for a subclass."""
    known = LAYER_ARRANGEMENTS.get(cls.__name__)
    if known is None or cls.__module__ != f"transformers.models.{known.family}.modeling_{known.family}":
        return None
    return known
