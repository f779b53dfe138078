"""The segments of a rank's piece: its tokens, cut at multiples of a fixed length and where sequences begin.

All ranks cut the whole sequence by the same global rule, so that a segment is the same on any rank. The stretch between
two neighbouring cuts of the grid is a *cell*. In rows that are not packed a cell is a segment; in packed rows it may
hold several, one for each sequence in it. The host knows which rank has which cell; only the device knows where packed
sequences begin, so that the host never waits for it.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.ops.context.product import product

PROGRAMS = 1024
"""Number of tiles of 64 value channels of the whole sequence that should be scanned at once; it decides the length of
segments. On each of eight ranks so many fill a large GPU."""


def segment_length(num_tokens: int, rows: int, value_heads: int, value_dim: int) -> int:
    """Tokens of a segment, a power of two of at least 64: longer segments cost less, and shorter ones fill a GPU.

    Args:
        num_tokens: number of tokens of the whole sequence on all ranks.
        rows: B.
        value_heads, value_dim: HV and V.
    """
    scans = rows * value_heads * -(-value_dim // 64)
    longest = min(num_tokens // 8, num_tokens * scans // PROGRAMS)
    return 1 << max(6, longest.bit_length() - 1)


class Cells(NamedTuple):
    """The cells of the whole sequence, in order."""

    bounds: tuple[int, ...]
    """Boundaries of the cells, in tokens of the whole sequence."""
    first: tuple[int, ...]
    """First cell of each rank, then the number of all cells."""
    uniform: bool
    """Whether all cells have the same length."""


def make_cells(lengths: tuple[int, ...], length: int) -> Cells:
    """The cells of pieces of these lengths, cut at multiples of `length` and between ranks."""
    ends = [sum(lengths[: rank + 1]) for rank in range(len(lengths))]
    bounds = sorted({*range(0, ends[-1], length), *ends})
    first = [0, *(bounds.index(end) for end in ends)]
    uniform = all(stop - start == length for start, stop in zip(bounds[:-1], bounds[1:], strict=True))
    return Cells(tuple(bounds), tuple(first), uniform)


cells_of = lru_cache(maxsize=256)(make_cells)
"""`make_cells` with a cache, which compilers do not trace."""


class Pieces:
    """The segments of one rank's tokens, and the states at their boundaries.

    There are S segments, n cells per row and N sequences; `[cells]` stands for `[n, B]`. This class is for rows that
    are not packed: each is a sequence, begun on the first rank and ended on the last.
    """

    cu_seqlens: Tensor | None = None
    """`[S + 1]` boundaries of the segments in the arranged row; None: every arranged row is a segment."""

    def __init__(self, cells: Cells, rank: int, rows: int, device: torch.device) -> None:
        self.rows, self.begins, self.ends = rows, rank == 0, rank == len(cells.first) - 2
        bounds = cells.bounds[cells.first[rank] : cells.first[rank + 1] + 1]
        self.num_cells = len(bounds) - 1
        self.num_tokens = bounds[-1] - bounds[0]
        if not cells.uniform:
            local = [row * self.num_tokens + x - bounds[0] for row in range(rows) for x in bounds[:-1]]
            self.cu_seqlens = torch.tensor([*local, rows * self.num_tokens], dtype=torch.int32).to(device)

    def arrange(self, x: Tensor) -> Tensor:
        """x `[B, T, ...]` in the form that the operator takes: segments as rows, or packed into one row."""
        if self.cu_seqlens is not None:
            return x.flatten(0, 1)[None]
        return x.unflatten(1, (self.num_cells, -1)).flatten(0, 1)

    def restore(self, x: Tensor) -> Tensor:
        """x as `[B, T, ...]`, the reverse of `arrange`."""
        return x.flatten(0, 1).unflatten(0, (self.rows, -1))

    def _by_cell(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.rows, self.num_cells)).transpose(0, 1)

    def _by_segment(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(0, 1)

    def cell_pairs(self, M: Tensor, X: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """Pairs of the cells from those of the segments, `[S, HV, K, K]` and `[S, HV, K, V]` -> `[cells, HV, ...]`."""
        M, X = self._by_cell(M), self._by_cell(X)
        if initial is not None and self.begins:
            X = X.clone()
            X[0] = product(M[0], initial, X[0])
        return M, X

    def starts(self, entering: Tensor, initial: Tensor | None) -> Tensor:
        """The first state of each segment, `[S, HV, K, V]`, from the states that enter the cells."""
        if initial is not None and self.begins:
            entering = entering.clone()
            entering[0] = initial
        return self._by_segment(entering)

    def finals(self, ends: Tensor, initial: Tensor | None) -> Tensor:
        """Final states `[N, HV, K, V]` of the sequences that end here, zeros for others."""
        last = self._by_cell(ends)[-1]
        return last.clone() if self.ends else torch.zeros_like(last)

    def end_gradients(self, d_final: Tensor) -> Tensor:
        """The gradient `[S, HV, K, V]` of each segment's last state through final states."""
        gradients = d_final.new_zeros(self.num_cells, *d_final.shape)
        if self.ends:
            gradients[-1] = d_final
        return self._by_segment(gradients)

    def cell_gradients(self, d_start: Tensor) -> Tensor:
        """The gradient of each cell's first state, from those of the segments, `[cells, HV, K, V]`."""
        return self._by_cell(d_start)

    def leaving_gradients(self, d_end: Tensor, d_leaving: Tensor) -> Tensor:
        """The sum of `end_gradients` and the gradients of the states that leave the cells."""
        return d_end + self._by_segment(d_leaving)

    def initial_gradients(self, d_start: Tensor, d_final: Tensor) -> Tensor:
        """Gradients `[N, HV, K, V]` of the initial states of the sequences that begin here, zeros for others."""
        first = self._by_cell(d_start)[0]
        return first.clone() if self.begins else torch.zeros_like(first)


class _PackedPieces(Pieces):
    """Packed sequences in one row, in which segments also end where sequences do.

    There are as many segments as this piece could need for any packing; unneeded ones are empty.
    """

    def __init__(self, cells: Cells, rank: int, cu_seqlens: Tensor) -> None:
        device, kind = cu_seqlens.device, torch.int64
        bounds = torch.tensor(cells.bounds[cells.first[rank] : cells.first[rank + 1] + 1], dtype=kind).to(device)
        begin, end = cells.bounds[cells.first[rank]], cells.bounds[cells.first[rank + 1]]
        whole = cu_seqlens.to(kind)
        cuts = torch.cat([whole[1:-1].clamp(begin, end), bounds]).sort().values
        self.cu_seqlens = (cuts - begin).to(torch.int32)
        starts, stops = cuts[:-1], cuts[1:]

        # For each segment: its sequence, and whether it begins or ends it. Empty segments do neither.
        sequence = torch.searchsorted(whole, starts, right=True) - 1
        self.sequence = sequence.clamp_(0, len(whole) - 2)
        real = starts < stops
        self.segment_begins = real & (whole[self.sequence] == starts)
        self.segment_ends = real & (whole[self.sequence + 1] == stops)
        # For each cell: its first and last segment, and whether the state that enters it reaches its end.
        self.first = torch.searchsorted(cuts, bounds[:-1], right=True) - 1
        self.last = torch.searchsorted(cuts, bounds[1:]) - 1
        self.entered = ~self.segment_begins[self.first]
        self.passed = self.entered & (self.first == self.last)
        # For each sequence: the segments that begin and end it, if they are here, and whether it is empty.
        self.empty = whole[:-1] == whole[1:]
        self.begins_here = (whole[:-1] >= begin) & (whole[:-1] < end)
        self.ends_here = (whole[1:] > begin) & (whole[1:] <= end) & ~self.empty
        self.stays_here = self.empty & (self.begins_here | ((whole[:-1] == end) & (rank == len(cells.first) - 2)))
        self.begins_here &= ~self.empty
        last_segment = len(cuts) - 2
        self.beginning = (torch.searchsorted(cuts, whole[:-1], right=True) - 1).clamp_(0, last_segment)
        self.ending = (torch.searchsorted(cuts, whole[1:]) - 1).clamp_(0, last_segment)

    def arrange(self, x: Tensor) -> Tensor:
        return x

    def restore(self, x: Tensor) -> Tensor:
        return x

    def cell_pairs(self, M: Tensor, X: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        M, X = M[self.last], X[self.last]
        if initial is not None:
            begins = self.segment_begins[self.last]
            X = product(M, _where(begins, initial[self.sequence[self.last]]), X)
        return _where(self.passed, M)[:, None], X[:, None]

    def starts(self, entering: Tensor, initial: Tensor | None) -> Tensor:
        S = len(self.sequence)
        states = entering.new_zeros(S, *entering.shape[2:])
        states[self.first] = _where(self.entered, entering[:, 0])
        return states if initial is None else states + _where(self.segment_begins, initial[self.sequence])

    def finals(self, ends: Tensor, initial: Tensor | None) -> Tensor:
        states = _where(self.ends_here, ends[self.ending])
        return states if initial is None else states + _where(self.stays_here, initial)

    def end_gradients(self, d_final: Tensor) -> Tensor:
        return _where(self.segment_ends, d_final[self.sequence])

    def cell_gradients(self, d_start: Tensor) -> Tensor:
        return _where(self.entered, d_start[self.first])[:, None]

    def leaving_gradients(self, d_end: Tensor, d_leaving: Tensor) -> Tensor:
        gradients = d_end.clone()
        gradients[self.last] += d_leaving[:, 0]
        return gradients

    def initial_gradients(self, d_start: Tensor, d_final: Tensor) -> Tensor:
        return _where(self.begins_here, d_start[self.beginning]) + _where(self.stays_here, d_final)


def _where(condition: Tensor, x: Tensor) -> Tensor:
    """x `[n, ...]` where the condition `[n]` holds, zero elsewhere, even if x is NaN there."""
    return x.masked_fill(~condition.reshape(-1, *[1] * (x.ndim - 1)), 0)


def pieces_of(cells: Cells, rank: int, rows: int, cu_seqlens: Tensor | None, device: torch.device) -> Pieces:
    """The segments of a rank's tokens."""
    return Pieces(cells, rank, rows, device) if cu_seqlens is None else _PackedPieces(cells, rank, cu_seqlens)
