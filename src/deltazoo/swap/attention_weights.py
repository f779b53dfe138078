"""Weights of a softmax attention layer in one form, however its model family stores them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from deltazoo.ops.dtypes import at_least_float32
from deltazoo.swap.families import ModelFamily

__all__ = ["AttentionWeights", "HeadShape", "read_attention", "read_shape"]


@dataclass(frozen=True)
class HeadShape:
    """Sizes of an attention layer and which parts it has: what is needed to build its replacement."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool
    qk_norm: str | None
    """Norms of queries and keys: "head", "width" (over all heads at once) or None."""
    qk_norm_eps: float
    has_rope: bool


@dataclass(frozen=True)
class AttentionWeights:
    """Tensors of an attention layer, as views of its parameters where possible."""

    weights: dict[str, Tensor]
    """By "q", "k", "v" and "o": `[out, in]`."""
    biases: dict[str, Tensor]
    """By the same names, those that exist: `[out]`."""
    norms: dict[str, Tensor]
    """By "q" and "k": factors `[head_dim]` or `[heads * head_dim]`, offset included; empty without norms."""


def read_shape(family: ModelFamily, attention: Any, config: PreTrainedConfig, index: int) -> HeadShape:
    """Sizes of one attention layer, after checking that it is as the family's entry says.

    Raises:
        ValueError: projections that are not plain matrices (quantised, adapted, offloaded), or of unexpected sizes.
    """
    for name in (*family.projections, family.output):
        _check_projection(getattr(attention, name, None), name, index)
    projection, output = getattr(attention, family.projections[0]), getattr(attention, family.output)
    num_heads: int = config.num_attention_heads
    num_kv_heads: int = getattr(config, "num_key_value_heads", None) or num_heads
    width = output.weight.shape[0 if family.transposed else 1]
    head_dim, rest = divmod(width, num_heads)
    if rest or num_heads % num_kv_heads:
        raise ValueError(
            f"layer {index}: {width} channels do not fit {num_heads} heads of queries and {num_kv_heads} of keys"
        )
    qk_norm, eps = None, 0.0
    if family.norms is not None:
        norm = getattr(attention, family.norms[0])
        qk_norm = "head" if norm.weight.numel() == head_dim else "width"
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
    return HeadShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv_bias=projection.bias is not None,
        o_bias=output.bias is not None,
        qk_norm=qk_norm,
        qk_norm_eps=eps,
        has_rope=family.rope and (family.rope_switch is None or bool(getattr(attention, family.rope_switch))),
    )


def _check_projection(projection: Any, name: str, index: int) -> None:
    kind = type(projection)
    if kind not in (nn.Linear, Conv1D):
        raise ValueError(
            f"layer {index}: expected {name} to be a plain linear map, got {kind.__module__}.{kind.__name__}; "
            "swap before quantising or adding adapters"
        )
    weight: Tensor = projection.weight
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise ValueError(f"layer {index}: {name} holds {weight.dtype}, a quantised weight; swap before quantising")


@torch.no_grad()
def read_attention(family: ModelFamily, attention: Any, shape: HeadShape, index: int) -> AttentionWeights:
    """Query, key, value and output weights of one attention layer, as separate tensors with rows by head.

    Raises:
        ValueError: the weights are not in memory.
    """
    projections = [getattr(attention, name) for name in family.projections]
    weights = [_rows(p.weight, family.transposed) for p in projections]
    biases = [p.bias for p in projections if p.bias is not None]
    output = getattr(attention, family.output)
    if any(w.is_meta for w in weights):
        raise ValueError(f"layer {index}: the weights are not in memory (meta device), so they cannot be copied")
    if family.fused is not None:
        weights = _split(weights[0], family, shape)
        biases = [part for bias in biases for part in _split(bias, family, shape)]
    norms = {
        part: at_least_float32(getattr(attention, name).weight) + family.norm_offset
        for part, name in zip("qk", family.norms or (), strict=False)
    }
    return AttentionWeights(
        weights=dict(zip("qkv", weights, strict=True)) | {"o": _rows(output.weight, family.transposed)},
        biases=dict(zip("qkv", biases, strict=False)) | ({"o": output.bias} if shape.o_bias else {}),
        norms=norms,
    )


def _rows(weight: Tensor, transposed: bool) -> Tensor:
    return weight.T if transposed else weight


def _split(x: Tensor, family: ModelFamily, shape: HeadShape) -> list[Tensor]:
    """Queries, keys and values out of one tensor whose rows hold all three."""
    if family.fused == "by_head":
        by_head = x.unflatten(0, (shape.num_heads, 3, shape.head_dim))
        return [part.flatten(0, 1) for part in by_head.unbind(1)]
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    return list(x.split([count * shape.head_dim for count in heads]))
