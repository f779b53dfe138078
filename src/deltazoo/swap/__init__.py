"""Swapping softmax attention of existing transformers models for delta-rule layers, and back."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.swap.families import FAMILIES, ModelFamily
    from deltazoo.swap.surgery import swap_attention, swapped_layers, unswap_attention
    from deltazoo.swap.swap_report import SwapReport
    from deltazoo.swap.swapped_attention import SwappedAttention

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
        "surgery": ("swap_attention", "swapped_layers", "unswap_attention"),
        "swap_report": ("SwapReport",),
        "swapped_attention": ("SwappedAttention",),
    },
)
