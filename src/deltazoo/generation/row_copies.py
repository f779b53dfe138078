"""The states of single rows of a static cache, taken out and put in."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from deltazoo.generation.cache import DeltaRuleCacheLayer
from deltazoo.generation.layer_contents import tensors_of
from deltazoo.generation.states import Snapshot, restore, snapshot

__all__ = ["RowCopies", "RowState", "RowStates"]


@dataclass(frozen=True, eq=False)
class RowState:
    """The states of one row in all layers, as `RowCopies` of one model exchange them. Nothing changes it."""

    blocks: tuple[Tensor, ...]
    """Of each dtype a vector with the contents of all its tensors."""

    @property
    def nbytes(self) -> int:
        """Memory of all tensors."""
        return sum(x.nbytes for x in self.blocks)


class RowCopies:
    """What `snapshot` and `restore` do for single rows, with one launch per dtype for all layers.

    Args:
        cache: static, of delta-rule layers that hold something, whose tensors stay where they are.
    """

    def __init__(self, cache: Cache) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for layer in cache.layers:
            for x in tensors_of(layer).values():
                by_dtype.setdefault(x.dtype, []).append(x)
        groups = [*by_dtype.values()]
        self._sizes = [[x[0].numel() for x in group] for group in groups]
        rows = min(len(x) for group in groups for x in group)
        # Made once: one view takes as long as a launch, and there are two for each layer.
        self._rows = [[[x[row].view(-1) for x in group] for group in groups] for row in range(rows)]

    @staticmethod
    def serve(cache: Cache) -> bool:
        """Whether the layers of a cache are all delta-rule layers whose states stay at their addresses."""
        return all(isinstance(layer, DeltaRuleCacheLayer) and layer.static for layer in cache.layers)

    def take(self, row: int) -> RowState:
        """A copy of a row."""
        return RowState(tuple(map(torch.cat, self._rows[row])))

    def empty(self) -> RowState:
        """A row before its first token."""
        return RowState(tuple(map(torch.zeros_like, self.take(0).blocks)))

    def put(self, row: int, state: RowState) -> None:
        """Replace a row."""
        for targets, block, sizes in zip(self._rows[row], state.blocks, self._sizes, strict=True):
            torch._foreach_copy_(targets, block.split(sizes))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Replace rows by others; none is both a source and a target."""
        if not sources:
            return
        for group in range(len(self._sizes)):
            torch._foreach_copy_(self._views(targets, group), self._views(sources, group))

    def _views(self, rows: Iterable[int], group: int) -> list[Tensor]:
        return [x for row in rows for x in self._rows[row][group]]


class RowStates:
    """The states of rows of a static cache, exchanged by `RowCopies` where that serves it, else as snapshots.

    Args:
        cache: filled, so that its tensors stay where they are.
        empty: the states of a row before its first token.

    Attributes:
        copied: whether they are exchanged by `RowCopies`; then all layers are delta-rule layers.
    """

    def __init__(self, cache: Cache, empty: Snapshot) -> None:
        self._cache = cache
        self.copied = RowCopies.serve(cache)
        self._copies = RowCopies(cache) if self.copied else None
        self._beginning = empty if self._copies is None else self._copies.empty()

    def put(self, row: int, state: RowState | Snapshot | None) -> None:
        """Replace a row; None: by one before its first token."""
        state = self._beginning if state is None else state
        if isinstance(state, RowState):
            assert self._copies is not None
            self._copies.put(row, state)
        else:
            restore(self._cache, state, rows=[row])

    def take(self, row: int, num_tokens: int) -> RowState | Snapshot:
        """A copy of a row, which has had `num_tokens` tokens."""
        if self._copies is not None:
            return self._copies.take(row)
        return snapshot(self._cache, rows=[row], num_tokens=num_tokens)

    def move(self, sources: Sequence[int], targets: Sequence[int], num_tokens: int) -> None:
        """Replace rows by others, which have had at most `num_tokens` tokens; none is both a source and a target."""
        if self._copies is not None:
            self._copies.move(sources, targets)
        else:
            restore(self._cache, snapshot(self._cache, rows=sources, num_tokens=num_tokens), rows=targets)
