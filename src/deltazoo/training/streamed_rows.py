"""Rows packed from a stream of records, with a position that can be saved and restored."""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from deltazoo.training.config import DataConfig
from deltazoo.training.corpus import training_documents
from deltazoo.training.packed_rows import RowPacker
from deltazoo.training.text import Records
from deltazoo.training.tokenizer import encode_documents


class StreamedRows(IterableDataset):
    """The training rows of a stream, without end: after the last record comes the first.

    ``position_after(n)`` is what a resumed run needs to go on after row ``n`` without reading earlier records again.
    """

    def __init__(
        self, source: Records, data: DataConfig, tokenizer: PreTrainedTokenizerBase, row_length: int, *, remembered: int
    ) -> None:
        """``remembered``: the number of latest rows whose position is kept; at least those read ahead."""
        self._source, self._data, self._tokenizer = source, data, tokenizer
        self._row_length, self._remembered = row_length, remembered
        self._positions: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._begin: dict[str, Any] | None = None

    def position_after(self, num_rows: int) -> dict[str, Any]:
        """The position of the stream after ``num_rows`` rows, as plain numbers, strings and lists.

        Raises:
            KeyError: that row is not among the latest.
        """
        return self._positions[num_rows]

    def go_to(self, position: dict[str, Any]) -> None:
        """Begin the next iteration at a ``position`` that ``position_after`` returned."""
        self._begin = position

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Rows as `PackedRows` returns them."""
        records = self._source.open()
        packer, num_rows = RowPacker(self._row_length), 0
        if self._begin is not None:
            records.load_state_dict(copy.deepcopy(self._begin["records"]))
            packer.pieces = [np.array(piece, dtype=np.int64) for piece in self._begin["pieces"]]
            num_rows = self._begin["num_rows"]
        while True:
            for document in training_documents(self._source.documents_of(records), self._data):
                packer.pieces.extend(encode_documents(self._tokenizer, [document], with_end=True))
                while packer.full:
                    row = packer.pop()
                    num_rows += 1
                    self._remember(num_rows, records, packer)
                    yield row
            records = self._source.open()

    def _remember(self, num_rows: int, records: Any, packer: RowPacker) -> None:
        self._positions[num_rows] = {
            "num_rows": num_rows,
            "records": copy.deepcopy(records.state_dict()),
            "pieces": [piece.tolist() for piece in packer.pieces],
        }
        while len(self._positions) > self._remembered:
            self._positions.popitem(last=False)
