"""The state that enters each cell, and the gradient of the state that leaves it, over all ranks.

Cells are folded in blocks of 2^j cells that begin at a multiple of 2^j, counted from the first cell of the whole
sequence, like a binary counter: the pair of a block comes from those of its halves, and the state at boundary c from
that at c minus the lowest set bit of c, through the block between. So the order of all sums follows from the global
numbers of the cells alone, and the results have the same bits however the cells are spread over ranks.

A rank's cells consist of O(log n) blocks that lie in no larger block of its own. The rank sends their pairs, in one
all-gather. In the backward pass the same blocks are folded from the end, with the transposed M, and only gradients are
sent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deltazoo.ops.context.group import ContextParallel, finished, started_gather
from deltazoo.ops.context.product import pair_of_two, product, with_middles

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


def depth(start: int, stop: int) -> int:
    """Number of sizes of blocks inside the cells from `start` to `stop`."""
    levels = 0
    while start < stop:
        levels, start, stop = levels + 1, -(-start // 2), stop // 2
    return levels


class Fold:
    """The fold of one call on one rank, which has n cells per row.

    Args:
        first: first cell of each rank, then the number of all cells.
        M: transitions of this rank's cells `[n, ..., K, K]`.
        X: the states that the cells leave from zero `[n, ..., K, V]`.
    """

    reverse = False
    """Whether the fold runs from the end."""

    def __init__(self, context: ContextParallel, first: tuple[int, ...], M: Tensor, X: Tensor) -> None:
        self._lay_out(context, first)
        K, self.levels, self.pairs = M.shape[-1], [(M, X)], [torch.empty(0)]
        for earlier, later in self.halves:
            M, X = self.levels[-1]
            pair = pair_of_two(M[earlier], X[earlier], M[later], X[later])
            self.pairs.append(pair)
            self.levels.append((pair[..., :K], pair[..., K:]))

    def _lay_out(self, context: ContextParallel, first: tuple[int, ...]) -> None:
        self.context, self.first = context, first
        start, stop = first[context.rank : context.rank + 2]
        self.starts, self.halves = [start], []
        """`starts`: for each level j, the number of the first block of 2^j cells that lies within this rank's cells.
        `halves`: for each level but the last, which of its blocks are first and second halves of the next level's."""
        for _ in range(depth(start, stop) - 1):
            begin, start, stop = start, -(-start // 2), stop // 2
            offset, count = 2 * start - begin, 2 * (stop - start) - 1
            self.halves.append(tuple(slice(offset + half, offset + half + count, 2) for half in (0, 1)))
            self.starts.append(start)

    def _sent(self, level: int, index: int) -> Tensor:
        """The pair of one of this rank's blocks side by side; in reverse only its X."""
        return self.pairs[level][index] if level else torch.cat([x[index] for x in self.levels[0]], -1)

    def _blocks_of(self, rank: int | None = None) -> tuple[Block, ...]:
        rank = self.context.rank if rank is None else rank
        return whole_blocks(self.first[rank], self.first[rank + 1])

    def start(self) -> Tensor:
        """The gathered pairs of all ranks' blocks, on their way: `gathered` of the methods below, once `finished`.

        Every rank sends an equal number of pairs.
        """
        own = [self._sent(level, number - self.starts[level]) for level, number in self._blocks_of()]
        most = max(len(self._blocks_of(rank)) for rank in range(self.context.size))
        sent = own[0][None] if most == 1 else torch.stack(own + [torch.zeros_like(own[0])] * (most - len(own)))
        return started_gather(sent, self.context)

    def transitions(self, gathered: Tensor) -> tuple[Tensor, ...]:
        """Transitions for the backward pass: the gathered ones, then those of each of `depth` levels here."""
        return gathered[..., : gathered.shape[-2]].contiguous(), *(M for M, _ in self.levels)

    def boundaries(self, gathered: Tensor) -> Tensor:
        """States that enter the cells; in reverse, gradients of those that leave them: `[n, ..., K, V]`."""
        M, X = self._received(finished(gathered, self.context))
        blocks = [self._blocks_of(rank) for rank in range(self.context.size)]
        slots = len(M) // self.context.size
        places = {block: rank * slots + i for rank in range(len(blocks)) for i, block in enumerate(blocks[rank])}
        at = _Boundaries(self.first[-1], places, M, X, self.reverse)
        return torch.cat([self._inside(level, number, at) for level, number in self._blocks_of()])

    def _received(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """M and X of the blocks of all ranks."""
        K = gathered.shape[-2]
        return gathered[..., :K], gathered[..., K:]

    def _inside(self, level: int, number: int, at: "_Boundaries") -> Tensor:
        """The boundaries of the cells of one of this rank's blocks."""
        begin, size = number << level, 1 << level
        values = at.value(begin + size if self.reverse else begin)[None]
        for lower in reversed(range(level)):
            # The earlier of two neighbouring blocks leads to the boundary between them; in reverse the later one.
            start = (begin >> lower) - self.starts[lower] + self.reverse
            M, X = (x[start : start + (size >> lower) - 1 + (not self.reverse) : 2] for x in self.levels[lower])
            values = with_middles(M, values, X, self.reverse)
        return values


class ReverseFold(Fold):
    """The fold of gradients from the end, in a backward pass; it joins no transitions again.

    Args:
        context, first: see `Fold`.
        transitions: the result of `Fold.transitions` in the forward pass.
        X: gradients of the states that enter this rank's cells, from within the cell alone.
    """

    reverse = True

    def __init__(
        self, context: ContextParallel, first: tuple[int, ...], transitions: Sequence[Tensor], X: Tensor
    ) -> None:
        self._lay_out(context, first)
        self.gathered_M, M, *joined = transitions
        self.levels = [(M, X)]
        for (earlier, later), joined_M in zip(self.halves, joined, strict=True):
            M, X = self.levels[-1]
            self.levels.append((joined_M, product(M[earlier], X[later], X[earlier], transposed=True)))

    def _sent(self, level: int, index: int) -> Tensor:
        return self.levels[level][1][index]

    def _received(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        return self.gathered_M, gathered


class _Boundaries:
    """Values at boundaries between ranks, from the pairs that all ranks have sent.

    Args:
        count: number of cells.
        places: places of blocks among the pairs.
        sent_M, sent_X: the pairs.
        reverse: whether the fold runs from the end.
    """

    def __init__(self, count: int, places: dict[Block, int], sent_M: Tensor, sent_X: Tensor, reverse: bool) -> None:
        self.count, self.places, self.sent_M, self.sent_X, self.reverse = count, places, sent_M, sent_X, reverse
        self.known: dict[int | Block, Tensor] = {}

    def value(self, boundary: int) -> Tensor:
        """The state at a boundary, or the gradient of the state there; zero at the outermost one."""
        outermost = self.count if self.reverse else 0
        if boundary == outermost:
            return self.sent_X.new_zeros(self.sent_X.shape[1:])
        if boundary not in self.known:
            block = whole_blocks(boundary, self.count)[0] if self.reverse else whole_blocks(0, boundary)[-1]
            size = 1 << block[0]
            outer = boundary + size if self.reverse else boundary - size
            if outer == outermost:
                self.known[boundary] = self._X(block)
            else:
                M = self._M(block)
                self.known[boundary] = product(M, self.value(outer), self._X(block), transposed=self.reverse)
        return self.known[boundary]

    def _M(self, block: Block) -> Tensor:
        """The transition of a block."""
        if block in self.places:
            return self.sent_M[self.places[block]]
        first, second = _halves_of(block)
        return product(self._M(second), self._M(first))

    def _X(self, block: Block) -> Tensor:
        """The state that a block leaves from zero."""
        if block in self.places:
            return self.sent_X[self.places[block]]
        if block not in self.known:
            near, far = _halves_of(block)[:: -1 if self.reverse else 1]
            self.known[block] = product(self._M(far), self._X(near), self._X(far), transposed=self.reverse)
        return self.known[block]


def _halves_of(block: Block) -> tuple[Block, Block]:
    level, number = block
    return (level - 1, 2 * number), (level - 1, 2 * number + 1)
