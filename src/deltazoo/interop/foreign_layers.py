"""Delta-rule layers of transformers' own models, and ours: the same function, with the weights arranged differently.

transformers fuses projections and the three convolutions, each model in its own way; a `ForeignLayout` says which rows
of which tensor are which of ours. Converting there and back is exact: rows are moved, never computed with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, make_layer

__all__ = ["FOREIGN_LAYERS", "ForeignLayout", "copy_into_transformers", "layer_from_transformers"]

_CONVOLUTIONS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")


@dataclass(frozen=True)
class ForeignLayout:
    """How one class of transformers arranges the parameters of a delta-rule layer."""

    variant: str
    """The registered variant it computes."""
    renamed: Mapping[str, str]
    """Foreign name -> our name, for parameters that differ in name only (and perhaps in axes of length one)."""
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"conv1d.weight": _CONVOLUTIONS})
    """Foreign name -> our names whose rows it holds one after another."""
    by_key_head: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same, but stacked separately for every key head."""
    zero: tuple[str, ...] = ()
    """Our parameters that the foreign layer does not have and that must be zero."""

    def to_ours(self, foreign: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], heads: int) -> dict[str, Tensor]:
        """Our state dict from a foreign one; `shapes` are those of our parameters."""
        ours = {self.renamed.get(name, name): x for name, x in foreign.items() if name not in self._fused}
        ours = {name: x.reshape(shapes[name]) for name, x in ours.items()}
        for name in self._fused & foreign.keys():  # older versions fuse less
            if name in self.stacked:
                parts, groups = self.stacked[name], 1
            else:
                parts, groups = self.by_key_head[name], heads
            rows = foreign[name].unflatten(0, (groups, -1)).split([shapes[part][0] // groups for part in parts], dim=1)
            ours |= {part: x.flatten(0, 1) for part, x in zip(parts, rows, strict=True)}
        return ours | {name: torch.zeros(shapes[name]) for name in self.zero}

    def to_foreign(self, ours: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], heads: int) -> dict[str, Tensor]:
        """A foreign state dict from ours; `shapes` are those of the foreign parameters."""
        for name in self.zero:
            if ours[name].any():
                raise ValueError(f"{name} is not zero, but the other layer has no such parameter")
        foreign = {}
        for name, shape in shapes.items():
            if name in self._fused:
                groups = 1 if name in self.stacked else heads
                parts = self.stacked.get(name) or self.by_key_head[name]
                rows = [ours[part].unflatten(0, (groups, -1)) for part in parts]
                foreign[name] = torch.cat(rows, dim=1).flatten(0, 1)
            else:
                foreign[name] = ours[self.renamed.get(name, name)].reshape(shape)
        return foreign

    @property
    def _fused(self) -> set[str]:
        return {*self.stacked, *self.by_key_head}


_QWEN3_NEXT = ForeignLayout(
    variant="gated_deltanet",
    renamed={"norm.weight": "o_norm.weight", "out_proj.weight": "o_proj.weight"},
    by_key_head={
        "in_proj_qkvz.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.weight"),
        "in_proj_ba.weight": ("b_proj.weight", "a_proj.weight"),
    },
)
_QWEN3_5 = ForeignLayout(
    variant="gated_deltanet",
    renamed={
        "norm.weight": "o_norm.weight",
        "out_proj.weight": "o_proj.weight",
        "in_proj_z.weight": "g_proj.weight",
        "in_proj_b.weight": "b_proj.weight",
        "in_proj_a.weight": "a_proj.weight",
    },
    stacked={
        "conv1d.weight": _CONVOLUTIONS,
        "in_proj_qkv.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    },
)
_KIMI_LINEAR = ForeignLayout(
    variant="kda",
    renamed={
        "forget_gate.f_a_proj.weight": "f_proj.0.weight",
        "forget_gate.f_b_proj.weight": "f_proj.1.weight",
        "forget_gate.A_log": "A_log",
        "forget_gate.dt_bias": "dt_bias",
        "g_a_proj.weight": "g_proj.0.weight",
        "g_b_proj.weight": "g_proj.1.weight",
    },
    zero=("g_proj.1.bias",),
)

FOREIGN_LAYERS: Mapping[str, ForeignLayout] = {
    "Qwen3NextGatedDeltaNet": _QWEN3_NEXT,
    "Qwen3_5GatedDeltaNet": _QWEN3_5,
    "Qwen3_5MoeGatedDeltaNet": _QWEN3_5,
    "OlmoHybridGatedDeltaNet": ForeignLayout(variant="gated_deltanet", renamed={}),
    "KimiLinearDeltaAttention": _KIMI_LINEAR,
}
"""By class name: the delta-rule layers of transformers that are one of our variants."""


def layer_from_transformers(layer: nn.Module) -> DeltaRuleAttention:
    """One of our layers that computes what a delta-rule layer of transformers computes, with a copy of its weights.

    Args:
        layer: an instance of a class in `FOREIGN_LAYERS`.

    Raises:
        ValueError: a layer of another class, or with another activation than SiLU.
    """
    layout = _layout_of(layer)
    if getattr(layer, "activation", "silu") not in ("silu", "swish"):
        raise ValueError(f"our convolutions use SiLU, but {type(layer).__name__} has activation {layer.activation!r}")
    norm = layer.get_submodule("norm" if "norm.weight" in layout.renamed else "o_norm")
    weight = next(layer.parameters())
    # transformers names the sizes of key and value heads apart only where they may differ.
    num_heads: Any = getattr(layer, "num_k_heads", None) or layer.num_heads
    head_dim: Any = getattr(layer, "head_k_dim", None) or layer.head_dim
    ours = make_layer(
        layout.variant,
        layer.hidden_size,  # type: ignore[arg-type]
        num_heads,
        head_dim,
        num_v_heads=getattr(layer, "num_v_heads", num_heads),
        expand_v=getattr(layer, "head_v_dim", head_dim) / head_dim,
        conv_size=layer.conv_kernel_size,
        allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        norm_eps=getattr(norm, "variance_epsilon", None) or norm.eps,
        layer_idx=layer.layer_idx,
    ).to(weight.device, weight.dtype)
    shapes = {name: x.shape for name, x in ours.state_dict().items()}
    ours.load_state_dict(layout.to_ours(layer.state_dict(), shapes, ours.num_heads))
    return ours.train(layer.training)


def copy_into_transformers(ours: DeltaRuleAttention, layer: nn.Module) -> None:
    """Copy our layer's weights into a delta-rule layer of transformers of the same sizes, in place.

    Raises:
        ValueError: another class, another variant, or a parameter the other layer has no place for.
    """
    layout = _layout_of(layer)
    if ours.spec.name != layout.variant:
        raise ValueError(f"{type(layer).__name__} is a {layout.variant} layer, got one of {ours.spec.name}")
    shapes = {name: x.shape for name, x in layer.state_dict().items()}
    layer.load_state_dict(layout.to_foreign(ours.state_dict(), shapes, ours.num_heads))


def _layout_of(layer: nn.Module) -> ForeignLayout:
    name = type(layer).__name__
    if name not in FOREIGN_LAYERS:
        raise ValueError(f"{name} is not a delta-rule layer we know; known: {', '.join(FOREIGN_LAYERS)}")
    return FOREIGN_LAYERS[name]
