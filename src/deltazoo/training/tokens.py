"""Tokens of a text: the tokenizer, and documents cut into rows of equal length for the model to read.

A row is ``row_length`` consecutive tokens, as pieces of documents, one after another. Recurrent state, convolutions and
positions restart where a piece begins.
"""

import copy
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from deltazoo.training.config import OptimizationConfig, TokenizerConfig
from deltazoo.training.console import console, say, track
from deltazoo.training.data import Corpus, Records, is_held_out
from deltazoo.training.loading import check_on_hub, load_tokenizer

BOS, EOS = "<|bos|>", "<|eos|>"
IGNORED = -100  # the label that the loss of transformers ignores
_ENCODE_AT_ONCE = 256  # documents per call, enough for all cores and few enough for a smooth progress bar

Row = list[np.ndarray]
"""Pieces of documents, at most row_length tokens together."""


def build_tokenizer(config: TokenizerConfig, texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a configuration; ``texts`` are the training part.

    Raises:
        ValueError: there is no such pretrained tokenizer, or it has no token that can begin a document.
    """
    if config.kind == "byte":
        return byte_tokenizer()
    if config.kind == "bpe":
        assert config.vocab_size is not None
        return train_bpe(texts, config.vocab_size)
    assert config.path is not None
    if not Path(config.path).exists():
        check_on_hub(config.path, "model")
    try:
        tokenizer = load_tokenizer(config.path)
    except ValueError as error:
        raise ValueError(f"tokenizer.path: {error}") from error
    begin_id(tokenizer)
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 258 entries: ``<|bos|>``, ``<|eos|>`` and a token per byte.

    ``tokenizer(prompt)`` begins with ``<|bos|>``, as every training document does.
    """
    alphabet = [BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **special, padding_side="left", clean_up_tokenization_spaces=False
    )


def train_bpe(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``vocab_size`` entries, ``<|bos|>`` and ``<|eos|>`` included.

    A text without so many distinct pairs yields fewer entries, and a line of output says so.

    Args:
        texts: the training part, never held-out text.
        vocab_size: at least 259.
    """
    # The time for a word grows with the square of its length, and emoji and Chinese text have no spaces.
    pieces = (piece for text in texts for piece in re.sub(r"\S{1000}(?=\S)", r"\g<0>\0", text).split("\0"))
    with console.status(f"training a tokenizer with {vocab_size} entries"):
        tokenizer = byte_tokenizer().train_new_from_iterator(pieces, vocab_size, show_progress=False)
    if len(tokenizer) < vocab_size:
        say(f"the text yields a vocabulary of {len(tokenizer)}, which is taken in place of {vocab_size}")
    return tokenizer


def begin_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token before every document: the tokenizer's BOS, or its EOS if it has no BOS.

    Raises:
        ValueError: it has neither.
    """
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ValueError("the tokenizer has neither a BOS nor an EOS token: nothing could stand before the first token")


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], description: str = "tokenizing", *, with_end: bool = False
) -> list[np.ndarray]:
    """Token ids of each document, the beginning token in front; a special token spelled in a text stays text.

    Args:
        tokenizer: any tokenizer with a BOS or an EOS token.
        description: text next to the progress bar.
        with_end: whether to append the tokenizer's EOS token, if it has one, so that a model learns to stop.

    Returns:
        One array per document, uint16 if the vocabulary fits into it, else int32.
    """
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.int32
    first = [begin_id(tokenizer)]
    last = [tokenizer.eos_token_id] if with_end and tokenizer.eos_token_id is not None else []
    options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
    pieces = [[*texts[i : i + _ENCODE_AT_ONCE]] for i in range(0, len(texts), _ENCODE_AT_ONCE)]
    return [
        np.array(first + ids + last, dtype=dtype)
        for piece in (track(pieces, description) if len(pieces) > 1 else pieces)
        for ids in tokenizer(piece, **options, verbose=False)["input_ids"]
    ]


def text_batch(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int, max_tokens: int
) -> dict[str, Any]:
    """The beginnings of documents as `input_ids` and `attention_mask` `[B, T]`, padded on the right.

    Args:
        length: most tokens of a document.
        max_tokens: most tokens in all: no document is added beyond them, except the first.
    """
    rows: list[torch.Tensor] = []
    for text in texts:
        (ids,) = encode_documents(tokenizer, [text])
        if rows and sum(map(len, rows)) + min(len(ids), length) > max_tokens:
            break
        rows.append(torch.tensor(ids[:length].astype(np.int64)))
    masks = [torch.ones_like(row) for row in rows]
    return {"input_ids": pad_sequence(rows, True), "attention_mask": pad_sequence(masks, True)}


class PackedRows:
    """The shuffled rows of an endless stream of documents, a map-style data set.

    The documents come in a new order each epoch; row ``n`` of the stream is its tokens ``[n * row_length,
    (n + 1) * row_length)``. Neighbouring rows often come from one document, and batches of them would be one-sided, so
    the rows of each block, one epoch long, are shuffled as well. The row at index ``i`` is a pure function of
    ``(seed, i)``, so a resumed run gets the rows that the uninterrupted run would have got. No token is dropped: a row
    may hold the end of one epoch and the beginning of the next.
    """

    def __init__(self, documents: Sequence[np.ndarray], row_length: int, *, num_rows: int, seed: int) -> None:
        self._tokens = np.concatenate(documents)
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        self._begins = np.concatenate([[0], np.cumsum(lengths)])
        self._row_length, self._num_rows, self._seed = row_length, num_rows, seed
        # Rows that are read at about the same time are in neighbouring epochs and blocks.
        self._epoch = lru_cache(maxsize=3)(self._make_epoch)
        self._block = lru_cache(maxsize=3)(self._make_block)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of all documents together."""
        return len(self._tokens)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Row:
        """The row at an index, always of ``row_length`` tokens."""
        block_length = max(1, self.tokens_per_epoch // self._row_length)
        block, index_in_block = divmod(index, block_length)
        position = (block * block_length + int(self._block(block, block_length)[index_in_block])) * self._row_length
        needed = self._row_length
        pieces: Row = []
        while needed:
            epoch, offset = divmod(position, self.tokens_per_epoch)
            order, ends = self._epoch(epoch)
            slot = int(np.searchsorted(ends, offset, side="right"))
            left = int(ends[slot]) - offset
            begin = int(self._begins[order[slot] + 1]) - left
            take = min(left, needed)
            pieces.append(self._tokens[begin : begin + take])
            position, needed = position + take, needed - take
        return pieces

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the documents in an epoch, and the offset at which each ends."""
        order = np.random.default_rng((self._seed, 0, epoch)).permutation(len(self._begins) - 1)
        return order, np.cumsum(np.diff(self._begins)[order])

    def _make_block(self, block: int, length: int) -> np.ndarray:
        """The order of the rows of a block."""
        return np.random.default_rng((self._seed, 1, block)).permutation(length)


class StreamedRows:
    """The first ``num_rows`` training rows of a stream, which begins again after its last record.

    It is a map-style data set whose indices must be read in rising order. A resumed run continues after row ``n`` from
    ``position_after(n)`` without reading earlier records again; index 0 is then the row after that.
    """

    def __init__(
        self,
        source: Records,
        tokenizer: PreTrainedTokenizerBase,
        row_length: int,
        *,
        num_rows: int,
        remembered: int,
    ) -> None:
        """``remembered``: number of the latest rows whose position is kept, at least those read ahead."""
        self._source, self._tokenizer, self._row_length = source, tokenizer, row_length
        self._num_rows = num_rows
        self._positions: deque[tuple[int, dict[str, Any]]] = deque(maxlen=remembered)
        self.go_to({"num_rows": 0, "records": None, "pieces": []})

    def position_after(self, num_rows: int) -> dict[str, Any]:
        """The position of the stream after ``num_rows`` rows, as plain numbers, strings and lists.

        Raises:
            KeyError: that row is not among the latest.
        """
        while self._read < num_rows:  # rows that only other processes read
            self._advance()
        return dict(self._positions)[num_rows]

    def go_to(self, position: dict[str, Any]) -> None:
        """Begin at a ``position`` that ``position_after`` returned."""
        self._begin, self._read = position["num_rows"], position["num_rows"]
        self._rows = self._rows_from(position)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Row:
        """The row at an index; rows before it, which other processes train on, are read as well."""
        if self._begin + index < self._read:
            raise IndexError(f"row {index} of a stream was read before")
        while self._read < self._begin + index:
            self._advance()
        return self._advance()

    def _advance(self) -> Row:
        self._read += 1
        return next(self._rows)

    def _rows_from(self, position: dict[str, Any]) -> Iterator[Row]:
        records = self._source.open()
        if position["records"] is not None:
            records.load_state_dict(copy.deepcopy(position["records"]))
        num_rows, from_start, read = position["num_rows"], position["records"] is None, 0
        pieces = deque(np.array(piece, dtype=np.int64) for piece in position["pieces"])
        while True:
            for document in self._source.documents_of(records):
                if not is_held_out(document.split_key, self._source.data.validation_fraction):
                    pieces.extend(encode_documents(self._tokenizer, [document.text], with_end=True))
                    read += len(pieces[-1])
                while num_tokens(pieces) >= self._row_length:
                    row = _take_row(pieces, self._row_length)
                    num_rows += 1
                    left = [piece.tolist() for piece in pieces]
                    found = {"num_rows": num_rows, "records": copy.deepcopy(records.state_dict()), "pieces": left}
                    self._positions.append((num_rows, found))
                    yield row
            if from_start:
                refuse_long_rows(self._row_length, read, self._source.description)
            records, from_start, read = self._source.open(), True, 0


def refuse_long_rows(row_length: int, tokens: int, source: str) -> None:
    """Raise ValueError if a row is longer than the training text, which it would hold more than once."""
    if row_length > tokens:
        raise ValueError(
            f"row_length is {row_length:,}, and the training text, from {source}, has {tokens:,} tokens, of which no "
            "row can be made: give more text or shorter rows"
        )


def num_tokens(pieces: Iterable[np.ndarray]) -> int:
    """Number of tokens of a row, or of pieces that wait for one."""
    return sum(map(len, pieces))


def _take_row(pieces: deque[np.ndarray], row_length: int) -> Row:
    """The next row, taken from the front of the pieces; a short one when fewer tokens are left."""
    row: Row = []
    while row_length and pieces:
        piece = pieces.popleft()
        row.append(piece[:row_length])
        if len(piece) > row_length:
            pieces.appendleft(piece[row_length:])
        row_length -= len(row[-1])
    return row


def pack_in_order(documents: Iterable[np.ndarray], row_length: int) -> list[Row]:
    """All rows of the documents, in their order; the last may be short."""
    pieces = deque(documents)
    rows: list[Row] = []
    while pieces:
        rows.append(_take_row(pieces, row_length))
    return rows


class TokenizedText:
    """The text of a run for its tokenizer: rows to train on, and the held-out documents.

    Attributes:
        tokenizer: tokenizer of the run.
        validation: token ids of each held-out document.
        bytes_per_token: bytes per token of the held-out text.
    """

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self._corpus = tokenizer, corpus
        self.validation = encode_documents(tokenizer, corpus.validation, "tokenizing the held-out text")
        self.bytes_per_token = corpus.validation_bytes / sum(len(ids) - 1 for ids in self.validation)

    @cached_property
    def _training(self) -> list[np.ndarray]:
        return encode_documents(self.tokenizer, self._corpus.train, "tokenizing the training text", with_end=True)

    def training_rows(self, settings: OptimizationConfig, seed: int) -> PackedRows | StreamedRows:
        """The rows that a run reads, the same for any number of processes; a stream is tokenized while it is read.

        Raises:
            ValueError: a row is longer than the text; of a stream the first row says so, when it is read.
        """
        size, count, source = settings.row_length, settings.steps * settings.rows_per_step, self._corpus.source
        if isinstance(source, Records) and source.data.streaming:
            remembered = 4 * settings.rows_per_step
            return StreamedRows(source, self.tokenizer, size, num_rows=count, remembered=remembered)
        refuse_long_rows(size, num_tokens(self._training), self._corpus.description)
        return PackedRows(self._training, size, num_rows=count, seed=seed)


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """Rows evenly spread over all of them, at most ``count``."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def collate(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows concatenated to one packed sequence.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids`` [1, T] int64 and ``cu_seqlens`` [N + 1] int32, T the tokens of
        all rows and N the documents or parts of documents in them. The first label of each is ignored: after the
        model's shift by one, the last token of the previous document would predict it.
    """
    pieces = [piece for row in rows for piece in row]
    lengths = np.array([len(piece) for piece in pieces])
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.concatenate(pieces).astype(np.int64)
    labels = ids.copy()
    labels[cu_seqlens[:-1]] = IGNORED
    positions = np.arange(len(ids)) - np.repeat(cu_seqlens[:-1], lengths)
    batch = {"input_ids": ids[None], "labels": labels[None], "position_ids": positions[None]}
    return {name: torch.from_numpy(x) for name, x in {**batch, "cu_seqlens": cu_seqlens.astype(np.int32)}.items()}


def collate_side_by_side(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows as a batch `[B, T]`, for models whose softmax layers would attend across the rows of one packed sequence.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids`` [B, T] int64. The positions restart where a document begins,
        which is how transformers recognises packed documents; the first label of each is ignored. A row shorter than
        the longest is padded with copies of its last token, whose labels are ignored.
    """
    longest = max(map(num_tokens, rows))
    batches = []
    for row in rows:
        size = num_tokens(row)
        batches.append(collate([[*row[:-1], np.pad(row[-1], (0, longest - size), mode="edge")]]))
        batches[-1]["labels"][:, size:] = IGNORED
    return {name: torch.cat([x[name] for x in batches]) for name in ("input_ids", "labels", "position_ids")}
