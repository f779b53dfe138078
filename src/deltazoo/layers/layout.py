"""Where sequences begin and end in a batch: one description of padding and of packing, made once per forward pass.

Both forms are made on the device, with shapes that do not depend on the values, so neither makes the host wait.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deltazoo.ops.validation import check_tensor, check_tensor_values

__all__ = ["PackedLayout", "PaddedLayout", "TokenLayout", "token_layout"]


@dataclass(frozen=True)
class PaddedLayout:
    """Rows of which only some tokens are real: padding on the left, on the right or in the middle.

    A layer moves each row's real tokens to its start, in order, works on those, and moves the results back. So every
    row sees exactly what it would see alone, wherever the padding lies.
    """

    mask: Tensor
    """`[B, T]` bool, True = real, in the caller's order."""
    order: Tensor
    """`[B, T]` int64: the caller's position of the token at each compact position."""
    inverse: Tensor
    """`[B, T]` int64: the compact position of each of the caller's tokens."""
    lengths: Tensor
    """`[B, 1]` int64: real tokens per row."""

    @classmethod
    def from_mask(cls, attention_mask: Tensor) -> "PaddedLayout":
        """From `[B, T]` bool or integer, nonzero = real."""
        mask = attention_mask.bool()
        lengths = mask.sum(1, keepdim=True)
        inverse = torch.where(mask, mask.cumsum(1), lengths + (~mask).cumsum(1)) - 1
        positions = torch.arange(mask.shape[1], device=mask.device).expand_as(inverse)
        order = torch.empty_like(inverse).scatter_(1, inverse, positions)
        return cls(mask, order, inverse, lengths)

    @property
    def real(self) -> Tensor:
        """`[B, T]` bool: which compact positions hold real tokens."""
        return torch.arange(self.mask.shape[1], device=self.mask.device) < self.lengths

    def compact(self, x: Tensor) -> Tensor:
        """`[B, T, D]` with each row's real tokens first and zeros behind them."""
        return _take(x, self.order).masked_fill(~self.real[..., None], 0)

    def restore(self, x: Tensor) -> Tensor:
        """Undo `compact`; padded positions are zero."""
        return _take(x, self.inverse).masked_fill(~self.mask[..., None], 0)


@dataclass(frozen=True)
class PackedLayout:
    """Sequences laid one after another along the time axis of a batch of one."""

    cu_seqlens: Tensor
    """`[N + 1]` integer: where each sequence begins, then the end of the last."""
    sequence: Tensor
    """`[T]` int64: which sequence each token belongs to."""

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, num_tokens: int) -> "PackedLayout":
        """From the boundaries; empty sequences are allowed."""
        tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        return cls(cu_seqlens, torch.searchsorted(cu_seqlens, tokens, right=True) - 1)

    @property
    def num_sequences(self) -> int:
        """N, empty sequences included."""
        return len(self.cu_seqlens) - 1


TokenLayout = PaddedLayout | PackedLayout


def token_layout(
    batch_size: int, num_tokens: int, *, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> TokenLayout | None:
    """The one description of a batch that a model's layers share, so that it is worked out once per forward pass.

    Args:
        batch_size, num_tokens: B and T of the current tokens.
        attention_mask: `[B, T]` bool or integer, nonzero = real, for the current tokens only.
        cu_seqlens: `[N + 1]` int32 or int64 boundaries of packed sequences; needs B = 1.

    Returns:
        None if every row is one whole sequence.

    Raises:
        ValueError: both are given, or one does not fit the batch. TypeError: one is no tensor.
    """
    check_tensor("attention_mask", attention_mask)
    check_tensor("cu_seqlens", cu_seqlens)
    if attention_mask is not None and cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens both say where sequences lie: pass one of them, not both")
    if attention_mask is not None:
        _check_mask(attention_mask, batch_size, num_tokens)
        return PaddedLayout.from_mask(attention_mask)
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, batch_size, num_tokens)
        return PackedLayout.from_cu_seqlens(cu_seqlens, num_tokens)
    return None


def _check_mask(mask: Tensor, batch_size: int, num_tokens: int) -> None:
    if mask.shape != (batch_size, num_tokens):
        raise ValueError(
            f"attention_mask must have shape ({batch_size}, {num_tokens}), one entry per current token, "
            f"got {tuple(mask.shape)}"
        )
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"attention_mask must be bool or integer with 1 = real token, got {mask.dtype}")


def _check_cu_seqlens(cu_seqlens: Tensor, batch_size: int, num_tokens: int) -> None:
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "cu_seqlens must be int32 or int64 of shape [N + 1] with N >= 1, "
            f"got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    if batch_size != 1:
        raise ValueError(f"packed sequences (cu_seqlens) need batch size 1, got {batch_size}")
    check_tensor_values(None, cu_seqlens, num_tokens)


def _take(x: Tensor, index: Tensor) -> Tensor:
    # index_select, because its backward has a deterministic form on GPUs where that of gather has none.
    rows = index + x.shape[1] * torch.arange(x.shape[0], device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, rows.flatten()).view_as(x)
