"""The state that enters each cell, and the gradient of the state that leaves it, over all ranks.

Cells are folded in blocks of 2^j cells that begin at a multiple of 2^j, counted from the first cell of the whole
sequence, like a binary counter: the pair of a block comes from those of its halves, and the state at boundary c from
that at c minus the lowest set bit of c, through the block between. So the order of all sums follows from the global
numbers of the cells alone, and the results have the same bits however the cells are spread over ranks.

A rank's cells consist of O(log n) blocks that lie in no larger block of its own. The rank sends their pairs, in one
all-gather. In the backward pass the same blocks are folded from the end, with the transposed M, and only gradients are
sent.
"""

import torch
from torch import Tensor

from deltazoo.ops.context.group import ContextParallel, finished, started_gather
from deltazoo.ops.context.product import product

__all__ = ["Fold"]

Block = tuple[int, int]
"""Level j and number i: the cells from `i << j` to `(i + 1) << j`."""


def whole_blocks(start: int, stop: int) -> tuple[Block, ...]:
    """The fewest blocks that contain exactly the cells from `start` to `stop`, in order."""
    blocks = []
    while start < stop:
        level = (stop - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        blocks.append((level, start >> level))
        start += 1 << level
    return tuple(blocks)


class Fold:
    """The fold of one call on one rank, which has n cells per row.

    Args:
        context: the ranks.
        first: first cell of each rank, then the number of all cells.
        M: transitions of this rank's cells `[n, ..., K, K]`.
        X: the states that the cells leave from zero `[n, ..., K, V]`; with `reverse` the gradients of the states that
            enter them, from within the cell alone.
        reverse: whether to fold from the end, in a backward pass.
    """

    def __init__(
        self, context: ContextParallel, first: tuple[int, ...], M: Tensor, X: Tensor, *, reverse: bool = False
    ) -> None:
        self.context, self.first, self.reverse = context, first, reverse
        self.begin, self.end = first[context.rank : context.rank + 2]
        self.levels = [(self.begin, M, X)]
        while (pairs := self._next_level(*self.levels[-1])) is not None:
            self.levels.append(pairs)

    def _next_level(self, low: int, M: Tensor, X: Tensor) -> tuple[int, Tensor, Tensor] | None:
        """Number of the first block of double length, and the pairs of such blocks inside this rank's cells."""
        first, stop = -(-low // 2), (low + len(M)) // 2
        if first >= stop:
            return None
        begin = 2 * first - low
        earlier, later = (slice(begin + half, begin + half + 2 * (stop - first) - 1, 2) for half in (0, 1))
        return first, *self._joined(M[earlier], X[earlier], M[later], X[later])

    def _joined(self, M: Tensor, X: Tensor, later_M: Tensor, later_X: Tensor) -> tuple[Tensor, Tensor]:
        """The pair of two neighbouring blocks."""
        if self.reverse:
            return product(later_M, M), product(M, later_X, X, transposed=True)
        return product(later_M, M), product(later_M, X, later_X)

    def _own_blocks(self, which: int) -> Tensor:
        """M (0) or X (1) of the blocks of this rank's cells `[m, ...]`; m is equal on all ranks."""
        own = []
        for level, number in self._blocks_of():
            first, *pair = self.levels[level]
            own.append(pair[which][number - first])
        most = max(len(self._blocks_of(rank)) for rank in range(self.context.size))
        return torch.stack(own + [torch.zeros_like(own[0])] * (most - len(own)))

    def _blocks_of(self, rank: int | None = None) -> tuple[Block, ...]:
        rank = self.context.rank if rank is None else rank
        return whole_blocks(self.first[rank], self.first[rank + 1])

    def start(self) -> Tensor:
        """The gathered pairs of all ranks, on their way: `gathered` of the methods below, once `finished`."""
        X = self._own_blocks(1)
        return started_gather(X if self.reverse else torch.cat([self._own_blocks(0), X], -1), self.context)

    def gathered_transitions(self, gathered: Tensor) -> Tensor:
        """The part of the pairs gathered in the forward pass that the backward pass needs."""
        return gathered[..., : gathered.shape[-2]].contiguous()

    def boundaries(self, gathered: Tensor, transitions: Tensor | None = None) -> Tensor:
        """States that enter the cells; with `reverse`, gradients of those that leave them: `[n, ..., K, V]`.

        Args:
            gathered: finished result of `start`.
            transitions: with `reverse`, the result of `gathered_transitions` in the forward pass.
        """
        gathered = finished(gathered, self.context)
        K = gathered.shape[-2]
        M, X = (gathered[..., :K], gathered[..., K:]) if transitions is None else (transitions, gathered)
        slots = len(M) // self.context.size
        known = {
            block: (M[rank * slots + i], X[rank * slots + i])
            for rank in range(self.context.size)
            for i, block in enumerate(self._blocks_of(rank))
        }
        at = _Boundaries(self, known)
        return torch.cat([self._inside(level, number, at) for level, number in self._blocks_of()])

    def _inside(self, level: int, number: int, at: "_Boundaries") -> Tensor:
        """The boundaries of the cells of one of this rank's blocks."""
        begin, size = number << level, 1 << level
        X = self.levels[0][2]
        values = X.new_empty(size + 1, *X.shape[1:])
        values[size if self.reverse else 0] = at.value(begin + size if self.reverse else begin, like=X[0])
        for lower in reversed(range(level)):
            step = 1 << lower
            first, *pairs = self.levels[lower]
            # The earlier of two neighbouring blocks leads to the boundary between them; in reverse the later one.
            start = (begin >> lower) - first + self.reverse
            M, X = (x[start : start + size // step - 1 + (not self.reverse) : 2] for x in pairs)
            source = values[2 * step :: 2 * step] if self.reverse else values[: -1 : 2 * step]
            values[step :: 2 * step] = product(M, source, X, transposed=self.reverse)
        return values[1:] if self.reverse else values[:-1]


class _Boundaries:
    """Values at boundaries between ranks, from the pairs that all ranks have sent."""

    def __init__(self, fold: Fold, known: dict[Block, tuple[Tensor, Tensor]]) -> None:
        self.fold, self.known = fold, known
        self.values: dict[int, Tensor] = {}

    def value(self, boundary: int, like: Tensor) -> Tensor:
        """The state at a boundary, or the gradient of the state there; zero at the outermost one."""
        reverse, count = self.fold.reverse, self.fold.first[-1]
        if boundary == (count if reverse else 0):
            return torch.zeros_like(like)
        if boundary not in self.values:
            block = whole_blocks(boundary, count)[0] if reverse else whole_blocks(0, boundary)[-1]
            size = 1 << block[0]
            M, X = self._pair(block)
            before = self.value(boundary + size if reverse else boundary - size, like)
            self.values[boundary] = product(M, before, X, transposed=reverse)
        return self.values[boundary]

    def _pair(self, block: Block) -> tuple[Tensor, Tensor]:
        if block not in self.known:
            level, number = block
            halves = self._pair((level - 1, 2 * number)), self._pair((level - 1, 2 * number + 1))
            self.known[block] = self.fold._joined(*halves[0], *halves[1])
        return self.known[block]
