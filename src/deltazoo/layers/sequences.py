"""Descriptions of a batch's sequences: whole rows, rows with padding, or packed sequences.

`describe_sequences` makes the description that a layer takes. The layers of a model share one, which
`deltazoo.generation.batch` makes of a model's arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from deltazoo.ops import ContextParallel
from deltazoo.ops.autograd_modes import transforming
from deltazoo.ops.context.group import agreed_piece
from deltazoo.ops.recompute import recomputable
from deltazoo.ops.validation import check_boundaries, check_tensor, check_tensor_values


@dataclass(frozen=True)
class Sequences:
    """Every row of the batch is one whole sequence. Rows with padding and packed documents are subclasses."""

    whole_rows: ClassVar[bool] = True
    """Whether every row is one whole sequence."""
    computed_meanwhile: ClassVar[tuple[str, ...]] = ()
    """Names of linear maps of a layer's input that are computed while the operator waits."""

    def arrange(self, x: Tensor) -> Tensor:
        """x `[B or 1, T, D]` in the arrangement on which a layer computes."""
        return x

    def restore(self, x: Tensor) -> Tensor:
        """x in the caller's arrangement."""
        return x

    @property
    def positions(self) -> Tensor | None:
        """`[B, T]` int64: position of each token in its packed document, from 0; None unless packed."""
        return None

    def row_length(self, x: Tensor) -> int:
        """Tokens of a whole row of x, arranged."""
        return x.shape[1]

    def meanwhile(self, work: Callable[..., None]) -> "Sequences":
        """The description for an operator that calls `work(*computed_meanwhile)` while it waits for other ranks."""
        return self

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """The description on another device."""
        moved = {
            name: x.to(device, non_blocking=non_blocking) for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        return replace(self, **moved) if moved else self


WHOLE_ROWS = Sequences()
"""The description of a batch without padding and packing."""


@dataclass(frozen=True)
class RightPaddedSequences(Sequences):
    """Rows that begin with their real tokens. A layer's results for the padding after them mean nothing."""

    whole_rows = False
    lengths: Tensor
    """`[B, 1]` int64: number of real tokens per row."""
    padding: Tensor
    """`[B, T]` bool: True at positions that hold no real token, after `arrange`."""

    @classmethod
    def from_lengths(cls, lengths: Tensor, num_tokens: int) -> "RightPaddedSequences":
        """The description of rows of `lengths` `[B, 1]` int64, at most T = `num_tokens` each."""
        return RightPaddedSequences(lengths, torch.arange(num_tokens, device=lengths.device) >= lengths)

    def last_inputs(self, width: int) -> tuple[Tensor, Tensor]:
        """Positions of the last `width` of each sequence's inputs, which begin with `width` inputs before the sequence.

        Returns:
            `[N, width]` int64 each, oldest first: the number of each among these inputs, below `width` if it comes
            before the sequence; and its number among the tokens of all rows, that of any token for those before.
        """
        # All layers of a model ask for the same. It is no field, since FSDP2 rebuilds arguments from all fields.
        found: dict[int, tuple[Tensor, Tensor]] = self.__dict__.setdefault("_found", {})
        if width not in found:
            rows, num_tokens = self.padding.shape
            number = self.lengths + torch.arange(width, device=self.lengths.device)
            begins = num_tokens * torch.arange(rows, device=self.lengths.device)[:, None]
            found[width] = number, (begins + number - width).clamp(min=0)
        return found[width]


@dataclass(frozen=True)
class PaddedSequences(RightPaddedSequences):
    """Rows of which only some tokens are real: padding on the left, on the right or in the middle.

    A layer moves each row's real tokens to its start, in order, computes on those, and moves the results back. So the
    results of a row equal those of its real tokens alone.
    """

    mask: Tensor
    """`[B, T]` bool, True = real, in the caller's order."""
    order: Tensor
    """`[B, T]` int64: position in the caller's order of the token at each new position."""
    inverse: Tensor
    """`[B, T]` int64: new position of each token in the caller's order."""

    @classmethod
    def from_mask(cls, attention_mask: Tensor) -> "PaddedSequences":
        """The description of a mask `[B, T]` bool or integer, nonzero = real."""
        mask = attention_mask.bool()
        lengths = mask.sum(1, keepdim=True)
        inverse = torch.where(mask, mask.cumsum(1), lengths + (~mask).cumsum(1)) - 1
        positions = torch.arange(mask.shape[1], device=mask.device).expand_as(inverse)
        order = torch.empty_like(inverse).scatter_(1, inverse, positions)
        return cls(lengths, positions >= lengths, mask, order, inverse)

    def arrange(self, x: Tensor) -> Tensor:
        """x `[B or 1, T, D]` as `[B, T, D]` with each row's real tokens first and zeros after them."""
        return recomputable(self._real_tokens_first, x)

    def _real_tokens_first(self, x: Tensor) -> Tensor:
        x = x.expand(self.mask.shape[0], -1, -1)
        return _take(x, self.order).masked_fill(self.padding[..., None], 0)

    def restore(self, x: Tensor) -> Tensor:
        """x in the caller's order; padded positions are zero."""
        return _take(x, self.inverse).masked_fill(~self.mask[..., None], 0)


@dataclass(frozen=True)
class PackedSequences(Sequences):
    """Several sequences in each row, one after another. A layer computes on all rows joined into one."""

    whole_rows = False
    cu_seqlens: Tensor
    """`[N + 1]` integer: the beginning of each sequence in the joined row, then the end of the last."""
    index: Tensor
    """`[B * T]` int64: number of the sequence to which each token belongs."""
    num_rows: int = 1
    """B."""
    documents: bool = True
    """Whether some row holds more than one sequence that is not empty; set where empty sequences were added."""

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, num_tokens: int, num_rows: int = 1) -> "PackedSequences":
        """The description of boundaries within the `num_tokens` tokens of all rows; empty sequences are allowed."""
        tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        return cls(cu_seqlens, torch.searchsorted(cu_seqlens, tokens, right=True) - 1, num_rows)

    @classmethod
    def from_starts(cls, starts: Tensor) -> "PackedSequences":
        """The description of starts `[B, T]` bool, True where a sequence begins; every row begins with one."""
        flat = starts.flatten()
        end = torch.tensor([flat.numel()], device=flat.device)
        return cls.from_cu_seqlens(torch.cat([flat.nonzero()[:, 0], end]).int(), flat.numel(), starts.shape[0])

    def padded(self) -> "PackedSequences":
        """The description with empty sequences added, which kernels skip, so that their number is a power of two.

        Batches of about as many documents then have tensors of one shape. The number is at least 8.
        """
        count = max(8, 1 << (self.num_sequences - 1).bit_length())
        end = self.cu_seqlens[-1:].expand(count - self.num_sequences)
        return replace(self, cu_seqlens=torch.cat([self.cu_seqlens, end]), documents=self.beyond_one_row)

    @property
    def num_sequences(self) -> int:
        """N, empty sequences included."""
        return len(self.cu_seqlens) - 1

    @property
    def beyond_one_row(self) -> bool:
        """Whether some row holds several documents."""
        return self.documents and self.num_sequences > self.num_rows

    @property
    def positions(self) -> Tensor:
        """`[B, T]` int64: position of each token in its sequence, from 0."""
        tokens = torch.arange(len(self.index), device=self.index.device)
        return (tokens - self.cu_seqlens[self.index]).view(self.num_rows, -1)

    def last_inputs(self, width: int) -> tuple[Tensor, Tensor]:
        """Positions of the last `width` of each sequence's inputs, see `RightPaddedSequences`."""
        number = (self.cu_seqlens.diff()[:, None] + torch.arange(width, device=self.cu_seqlens.device)).long()
        token = (self.cu_seqlens[:-1, None].long() + number - width).clamp(0, len(self.index) - 1)
        return number, token

    def arrange(self, x: Tensor) -> Tensor:
        """x `[B or 1, T, D]` as `[1, B * T, D]`."""
        return x if self.num_rows == 1 else x.expand(self.num_rows, -1, -1).reshape(1, -1, x.shape[-1])

    def restore(self, x: Tensor) -> Tensor:
        """x as `[B, T, D]`."""
        return x if self.num_rows == 1 else x.view(self.num_rows, -1, x.shape[-1])


@dataclass(frozen=True)
class SharedSequences(Sequences):
    """A piece of every row, whose other tokens are on other ranks (context parallelism)."""

    whole_rows = False
    computed_meanwhile = ("g_proj",)
    context: ContextParallel
    """The ranks, with the lengths of their pieces."""
    cu_seqlens: Tensor | None = None
    """`[N + 1]`: boundaries of sequences packed into the whole row; None: every row is one sequence."""

    @property
    def begin(self) -> int:
        """Number of the piece's first token in the whole row."""
        return sum(self.context.known_lengths[: self.context.rank])

    @property
    def num_tokens(self) -> int:
        """T, the tokens of the piece."""
        return self.context.known_lengths[self.context.rank]

    def row_length(self, x: Tensor) -> int:
        """Number of tokens in the whole row."""
        return sum(self.context.known_lengths)

    @property
    def positions(self) -> Tensor | None:
        """`[1, T]` int64: position of each token in its packed sequence, from 0; None unless packed."""
        if self.cu_seqlens is None:
            return None
        tokens = torch.arange(self.begin, self.begin + self.num_tokens, device=self.cu_seqlens.device)
        return (tokens - self.cu_seqlens[torch.searchsorted(self.cu_seqlens, tokens, right=True) - 1])[None]

    def meanwhile(self, work: Callable[..., None]) -> "SharedSequences":
        """The description for an operator that calls `work(*computed_meanwhile)` while it waits for other ranks."""
        return replace(self, context=replace(self.context, meanwhile=partial(work, *self.computed_meanwhile)))

    def with_tokens_before(self, width: int) -> Sequences:
        """The description of the piece's tokens and the `width` tokens before them, as if there were no others."""
        if self.cu_seqlens is None:
            return WHOLE_ROWS
        bounds = (self.cu_seqlens - (self.begin - width)).clamp(0, self.num_tokens + width)
        return PackedSequences.from_cu_seqlens(torch.cat([bounds.new_zeros(1), bounds[1:]]), self.num_tokens + width)


def describe_shared(
    context: ContextParallel,
    batch_size: int,
    num_tokens: int,
    cu_seqlens: Tensor | None = None,
    check: Callable[[], None] | None = None,
    *,
    fills_cache: bool = False,
) -> SharedSequences:
    """The description of a piece of rows that several ranks share; the ranks tell each other its length.

    Args:
        context: the ranks that share the rows.
        batch_size, num_tokens: B and T of this rank's tokens.
        cu_seqlens: `[N + 1]` int32 or int64 boundaries of sequences packed into the whole row; needs B = 1.
            check: a function that raises ValueError or TypeError if other arguments are wrong; then all ranks raise.
            fills_cache: whether every rank keeps the state after the whole row.

    Raises:
        ValueError: on every rank, if the boundaries do not fit the tokens of all ranks, or the ranks differ.
    """

    def described() -> int:
        if cu_seqlens is not None:
            check_boundaries(cu_seqlens, batch_size)
        if fills_cache and cu_seqlens is not None:
            raise ValueError("packed sequences fill no cache: run them without past_key_values")
        if check is not None:
            check()
        return batch_size

    if fills_cache:
        context = replace(context, gather_final_state=True)
    return SharedSequences(agreed_piece(context, num_tokens, cu_seqlens, described), cu_seqlens)


def describe_sequences(
    batch_size: int, num_tokens: int, *, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Sequences:
    """The description of a batch that a layer takes, from a padding mask or from boundaries.

    Args:
        batch_size, num_tokens: B and T of the current tokens.
        attention_mask: `[B, T]` bool or integer, 1 = real, for the current tokens only.
        cu_seqlens: `[N + 1]` int32 or int64 boundaries of packed sequences; needs B = 1.

    Raises:
        ValueError: both are given, or one does not fit the batch.
        TypeError: one is no tensor.
    """
    check_tensor("attention_mask", attention_mask)
    check_tensor("cu_seqlens", cu_seqlens)
    if attention_mask is not None and cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens both say where sequences begin: pass one of them, not both")
    if attention_mask is not None:
        if attention_mask.shape != (batch_size, num_tokens):
            raise ValueError(
                f"attention_mask must have shape ({batch_size}, {num_tokens}), one entry per current token, "
                f"got {tuple(attention_mask.shape)}"
            )
        if attention_mask.is_floating_point() or attention_mask.is_complex():
            raise ValueError(f"attention_mask must be bool or integer with 1 = real token, got {attention_mask.dtype}")
        return PaddedSequences.from_mask(zeros_and_ones(attention_mask))
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch_size, num_tokens)
        return PackedSequences.from_cu_seqlens(cu_seqlens, num_tokens)
    return WHOLE_ROWS


def zeros_and_ones(mask: Tensor) -> Tensor:
    """A mask of whole numbers as bool. Values other than 0 and 1 raise ValueError where reading them is free."""
    if mask.dtype == torch.bool:
        return mask
    if readable(mask) and mask.numel():
        check_zeros_and_ones(int(mask.min()), int(mask.max()))
    return mask.bool()


def check_zeros_and_ones(least: int, most: int) -> None:
    """Raise ValueError for the least and the largest value of a mask other than 0 and 1."""
    if not 0 <= least <= most <= 1:
        raise ValueError(
            f"attention_mask must hold only 0 and 1, got values from {least} to {most}; "
            "for packed documents pass cu_seqlens, or seq_idx to a model"
        )


def readable(x: Tensor) -> bool:
    """Whether reading values is free: neither tracing nor a transform is active, and the CPU waits for no device."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not transforming()


def check_cu_seqlens(cu_seqlens: Tensor, batch_size: int, num_tokens: int) -> None:
    """Raise ValueError unless these are boundaries of sequences packed into the one row of a batch."""
    check_boundaries(cu_seqlens, batch_size)
    check_tensor_values(None, cu_seqlens, num_tokens)


def _take(x: Tensor, index: Tensor) -> Tensor:
    # index_select, because its backward has a deterministic form on GPUs where that of gather has none.
    rows = index + x.shape[1] * torch.arange(x.shape[0], device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, rows.flatten()).view_as(x)
