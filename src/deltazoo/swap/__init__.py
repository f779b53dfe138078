"""Swapping softmax attention of existing transformers models for delta-rule layers, and back."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.swap.families import FAMILIES, ModelFamily
    from deltazoo.swap.layer import SwappedAttention, swapped_layers
    from deltazoo.swap.report import SwapReport
    from deltazoo.swap.surgery import swap_attention, unswap_attention

__all__ = [
    "FAMILIES",
    "ModelFamily",
    "SwapReport",
    "SwappedAttention",
    "swap_attention",
    "swapped_layers",
    "unswap_attention",
]

__getattr__ = lazy_names(
    __name__,
    {
        "families": ("FAMILIES", "ModelFamily"),
        "layer": ("SwappedAttention", "swapped_layers"),
        "report": ("SwapReport",),
        "surgery": ("swap_attention", "unswap_attention"),
    },
)
