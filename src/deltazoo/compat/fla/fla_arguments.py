"""Arguments of flash-linear-attention that need no computation: hints, deprecated names, and what is refused."""

import warnings
from typing import Any

import torch
from torch import Tensor

from deltazoo.names import unknown

__all__ = ["refuse_context_parallelism", "require_boundaries", "take_state_layout"]

_HINTS = ("chunk_size", "chunk_indices", "cu_seqlens_cpu", "safe_gate", "disable_recompute")
"""Options that choose how flash-linear-attention computes and do not change what; ours needs none of them."""


def take_state_layout(function: str, state_v_first: bool, options: dict[str, Any]) -> bool:
    """Read the keyword arguments that a signature does not name, and return `state_v_first`.

    Args:
        function: its name, for messages.
        state_v_first: as given under that name.
        options: the remaining keyword arguments. `head_first=False` and hints change nothing.

    Raises:
        ValueError: `head_first=True`, or two names for one option. TypeError: an unknown argument.
    """
    options = {name: value for name, value in options.items() if name not in _HINTS}
    if options.pop("head_first", False):
        raise ValueError(
            f"{function} takes [B, T, H, ...], and flash-linear-attention 0.6 has removed head_first: pass "
            "x.transpose(1, 2) of every input and output in place of head_first=True"
        )
    old_name = options.pop("transpose_state_layout", None)
    if old_name is not None:
        if state_v_first:
            raise ValueError("transpose_state_layout is the old name of state_v_first: pass state_v_first alone")
        warnings.warn("transpose_state_layout is the old name of state_v_first", DeprecationWarning, stacklevel=3)
        state_v_first = old_name
    if options:
        known = ("head_first", "transpose_state_layout", *_HINTS)
        raise TypeError(unknown(f"argument of {function}", next(iter(options)), known))
    return state_v_first


def refuse_context_parallelism(function: str, cp_context: object) -> None:
    """Raise NotImplementedError for a context."""
    if cp_context is not None:
        raise NotImplementedError(
            f"{function} computes whole sequences on one device: pass cp_context=None and every token of a sequence "
            "to one rank. deltazoo.delta_rule and the layers share a sequence between ranks by a context of their own"
        )


def require_boundaries(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> None:
    """Raise ValueError for a copy of boundaries without the boundaries, or one that differs where that can be seen."""
    if cu_seqlens_cpu is None:
        return
    if cu_seqlens is None:
        raise ValueError("cu_seqlens_cpu is a copy of cu_seqlens, which was not given: pass cu_seqlens as well")
    if cu_seqlens.device.type == "cpu" and not torch.equal(cu_seqlens, cu_seqlens_cpu):
        raise ValueError(f"cu_seqlens_cpu must equal cu_seqlens, got {cu_seqlens_cpu} and {cu_seqlens}")
