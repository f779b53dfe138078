"""Pack documents into rows of equal length, with the offsets at which documents begin.

A row is ``row_length`` consecutive tokens of an endless stream of shuffled documents. Its ``starts`` are the offsets at
which a document, or the rest of one, begins. The recurrent state, the convolutions and the positions restart there.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

IGNORED = -100  # the label that the loss of transformers ignores


class PackedRows(Dataset):
    """The shuffled rows of an endless stream of documents.

    The documents come in a new order each epoch; row ``n`` of the stream is its tokens ``[n * row_length,
    (n + 1) * row_length)``. Neighbouring rows often come from one document, and batches of them would be one-sided, so
    the rows of each block, one epoch long, are shuffled as well. The row at index ``i`` is a pure function of
    ``(seed, i)``, so a resumed run gets the rows that the uninterrupted run would have got. No token is dropped: a row
    may hold the end of one epoch and the beginning of the next.
    """

    def __init__(self, documents: Sequence[np.ndarray], row_length: int, *, num_rows: int, seed: int) -> None:
        if not documents:
            raise ValueError("there is no document to pack")
        self._tokens = np.concatenate(documents)
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        self._begins = np.concatenate([[0], np.cumsum(lengths)])
        self._row_length, self._num_rows, self._seed = row_length, num_rows, seed
        # Rows that are read at about the same time lie in neighbouring epochs and blocks.
        self._epoch = lru_cache(maxsize=3)(self._make_epoch)
        self._block = lru_cache(maxsize=3)(self._make_block)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of all documents together."""
        return len(self._tokens)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """``input_ids`` [row_length] int64 and ``starts``, the offsets in the row where a document begins (0 first)."""
        block_length = max(1, self.tokens_per_epoch // self._row_length)
        block, index_in_block = divmod(index, block_length)
        position = (block * block_length + int(self._block(block, block_length)[index_in_block])) * self._row_length
        needed = self._row_length
        pieces: list[np.ndarray] = []
        starts: list[int] = []
        while needed:
            epoch, offset = divmod(position, self.tokens_per_epoch)
            order, ends = self._epoch(epoch)
            slot = int(np.searchsorted(ends, offset, side="right"))
            left = int(ends[slot]) - offset
            begin = int(self._begins[order[slot] + 1]) - left
            take = min(left, needed)
            starts.append(self._row_length - needed)
            pieces.append(self._tokens[begin : begin + take])
            position, needed = position + take, needed - take
        return {"input_ids": np.concatenate(pieces).astype(np.int64), "starts": np.array(starts, dtype=np.int64)}

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the documents in an epoch, and the offset at which each ends."""
        order = np.random.default_rng((self._seed, 0, epoch)).permutation(len(self._begins) - 1)
        return order, np.cumsum(np.diff(self._begins)[order])

    def _make_block(self, block: int, length: int) -> np.ndarray:
        """The order of the rows of a block."""
        return np.random.default_rng((self._seed, 1, block)).permutation(length)


class RowPacker:
    """Packs documents that come one by one into rows."""

    def __init__(self, row_length: int, pieces: Sequence[np.ndarray] = ()) -> None:
        self.row_length = row_length
        self.pieces = list(pieces)  # documents, or rests of them, not yet packed

    @property
    def full(self) -> bool:
        """Whether the pieces fill a whole row."""
        return sum(len(piece) for piece in self.pieces) >= self.row_length

    def pop(self) -> dict[str, np.ndarray]:
        """The next row, as `PackedRows` gives it; a short one when fewer tokens are left."""
        taken: list[np.ndarray] = []
        missing = self.row_length
        while missing and self.pieces:
            piece = self.pieces[0]
            taken.append(piece[:missing])
            missing -= len(taken[-1])
            if len(taken[-1]) == len(piece):
                self.pieces.pop(0)
            else:
                self.pieces[0] = piece[len(taken[-1]) :]
        starts = np.cumsum([0, *(len(piece) for piece in taken[:-1])])
        return {"input_ids": np.concatenate(taken).astype(np.int64), "starts": starts.astype(np.int64)}


def pack_in_order(documents: Iterable[np.ndarray], row_length: int) -> list[dict[str, np.ndarray]]:
    """All rows of the documents, in their order; the last may be short."""
    packer = RowPacker(row_length)
    rows: list[dict[str, np.ndarray]] = []
    for document in documents:
        packer.pieces.append(document)
        while packer.full:
            rows.append(packer.pop())
    return [*rows, packer.pop()] if packer.pieces else rows


def spread(rows: Sequence[dict[str, np.ndarray]], count: int) -> list[dict[str, np.ndarray]]:
    """At most ``count`` of the rows, evenly spread over all of them."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def collate_side_by_side(rows: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Rows as a batch `[B, T]`, for models whose softmax layers would attend across the rows of one packed sequence.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids`` [B, T] int64. The positions restart where a document begins,
        which is how transformers recognises packed documents; the first label of each is ignored. A row shorter than
        the longest is padded with copies of its last token, whose labels are ignored.
    """
    length = max(len(row["input_ids"]) for row in rows)
    padded = [np.pad(row["input_ids"], (0, length - len(row["input_ids"])), mode="edge") for row in rows]
    ids = np.stack(padded)
    labels, positions = ids.copy(), np.empty_like(ids)
    for row, row_labels, row_positions in zip(rows, labels, positions, strict=True):
        starts = row["starts"]
        row_labels[starts] = IGNORED
        row_labels[len(row["input_ids"]) :] = IGNORED
        row_positions[:] = np.arange(length) - np.repeat(starts, np.diff(np.append(starts, length)))
    return {
        name: torch.from_numpy(x) for name, x in (("input_ids", ids), ("labels", labels), ("position_ids", positions))
    }


def collate(rows: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Rows concatenated to one packed sequence.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids`` [1, T] int64 and ``cu_seqlens`` [N + 1] int32, T the tokens of
        all rows and N the documents or parts of documents in them. The first label of each is ignored: after the
        model's shift by one, the last token of the previous document would predict it.
    """
    ids = np.concatenate([row["input_ids"] for row in rows])
    offsets = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
    starts = np.concatenate([row["starts"] + offset for row, offset in zip(rows, offsets[:-1], strict=True)])
    cu_seqlens = np.append(starts, len(ids))
    labels = ids.copy()
    labels[starts] = IGNORED
    positions = np.arange(len(ids)) - np.repeat(starts, np.diff(cu_seqlens))
    return {
        "input_ids": torch.from_numpy(ids)[None],
        "labels": torch.from_numpy(labels)[None],
        "position_ids": torch.from_numpy(positions)[None],
        "cu_seqlens": torch.from_numpy(cu_seqlens.astype(np.int32)),
    }
