"""Swapping softmax attention of existing transformers models for delta-rule layers, and back."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.swap.attention import SwappedAttention
    from deltazoo.swap.hosts import HOSTS, Host
    from deltazoo.swap.report import SwapReport
    from deltazoo.swap.surgery import swap_attention, swapped_layers, unswap_attention

__all__ = [
    "HOSTS",
    "Host",
    "SwapReport",
    "SwappedAttention",
    "swap_attention",
    "swapped_layers",
    "unswap_attention",
]

__getattr__ = lazy_names(
    __name__,
    {
        "attention": ("SwappedAttention",),
        "hosts": ("HOSTS", "Host"),
        "report": ("SwapReport",),
        "surgery": ("swap_attention", "swapped_layers", "unswap_attention"),
    },
)
