"""Prompts that run piece by piece, a few at a time: the states after them become rows of a table.

The rows of a pass are one batch. Its shape does not depend on how long the prompts are, since pieces are padded on the
right; so on a GPU a pass is one CUDA graph.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache

from deltazoo.generation.batch import BatchDescription
from deltazoo.generation.cache_argument import CACHE
from deltazoo.generation.decoder import prepared_inputs
from deltazoo.generation.read_later import wait_for
from deltazoo.generation.row_copies import RowState, RowStates
from deltazoo.generation.row_table import cache_of_rows, forward_tokens
from deltazoo.generation.states import Snapshot, restore, snapshot
from deltazoo.generation.static_cache import fixed_cache, some_rows
from deltazoo.generation.step import CapturedStep
from deltazoo.layers import RightPaddedSequences

__all__ = ["PromptRows"]

_log = logging.getLogger(__name__)


class PromptRows:
    """A few rows in which prompts run piece by piece; the states after each piece can be taken out.

    Args:
        model: as for `RowTable`.
        sizes: numbers of rows that a pass can have.
        piece: most tokens of a row in one pass.
        empty: `RowTable.empty`.
        max_length: as for `RowTable`.
        padded: the rows of a pass are one batch, with `piece` tokens each, of which some are padding; on a GPU it is a
            CUDA graph for each size. Otherwise the rows run one by one, without padding.
    """

    def __init__(
        self,
        model: Any,
        sizes: Sequence[int],
        piece: int,
        empty: Snapshot,
        *,
        padded: bool,
        max_length: int | None = None,
    ) -> None:
        self.sizes = tuple(sorted(set(sizes)))
        self.piece = piece
        self.padded = padded
        self._one_by_one = partial(_RowsOneByOne, model, self.sizes[-1], empty, max_length)
        self._rows: _RowsInOneBatch | _RowsOneByOne = (
            _RowsInOneBatch(model, self.sizes[-1], piece, empty, max_length) if padded else self._one_by_one()
        )

    def best_count(self, waiting: int) -> int:
        """How many of some waiting rows to run in the next pass: as many as fill one, if they fill any."""
        return max((size for size in self.sizes if size <= waiting), default=waiting)

    def size_for(self, count: int) -> int:
        """Of a pass over `count` rows, which are to be among its first."""
        return next(size for size in self.sizes if size >= count)

    @torch.no_grad()
    def capture(self) -> None:
        """Prepare the passes of all sizes; they are prepared at their first use otherwise.

        If a pass of a model with softmax layers waits for the device, there are none from now on: rows run one by one
        without padding, and the log says so.
        """
        if not isinstance(self._rows, _RowsInOneBatch):
            return
        try:
            for size in reversed(self.sizes):
                self._rows.prepare(size)
            return
        except RuntimeError as error:
            if self._rows.states.copied:  # then there are no softmax layers
                raise
            _log.warning("prompts run one by one and without CUDA graphs, which makes them slower: %s", error)
        # Not in the handler: there the error still holds the rows, with the graphs of other sizes and their memory.
        self.padded = False
        del self._rows
        self._rows = self._one_by_one()

    @torch.no_grad()
    def load(self, row: int, state: RowState | Snapshot | None) -> None:
        """Continue a row from a state of this model's `PromptRows`; None: from the beginning."""
        self._rows.load(row, state)

    @torch.no_grad()
    def take(self, row: int, num_tokens: int) -> RowState | Snapshot:
        """The state of a row, which has had `num_tokens` tokens."""
        return self._rows.take(row, num_tokens)

    @torch.no_grad()
    def run(self, pieces: Mapping[int, tuple[int, Sequence[int]]]) -> Callable[[], None]:
        """Advance some rows; the contents of the others are lost.

        Args:
            pieces: by row: how many tokens the row has had, and at most `piece` further ones.

        Returns:
            A function that waits until the device has done it.
        """
        return self._rows.run(pieces, self.size_for(max(pieces) + 1))


class _RowsOneByOne:
    """Rows that run one after another, each without padding and with a cache, and so a count of tokens, of its own."""

    def __init__(self, model: Any, rows: int, empty: Snapshot, max_length: int | None) -> None:
        self.model = model
        self._empty = empty
        self._caches = [fixed_cache(model, max_length or 1) for _ in range(rows)]
        for cache in self._caches:
            restore(cache, empty)

    def load(self, row: int, state: Any) -> None:
        restore(self._caches[row], self._empty if state is None else state)

    def take(self, row: int, num_tokens: int) -> Snapshot:
        return snapshot(self._caches[row], num_tokens=num_tokens)

    def run(self, pieces: Mapping[int, tuple[int, Sequence[int]]], size: int) -> Callable[[], None]:
        """As of `PromptRows`; it does not matter to which size of a pass the rows would fit."""
        for row, (start, tokens) in pieces.items():
            ids = _on_device([tokens], self.model.device)
            positions = torch.arange(start, start + len(tokens), device=ids.device)[None]
            forward_tokens(self.model, ids, self._caches[row], positions)
        return wait_for(self.model.device)


class _RowsInOneBatch:
    """Rows that run together, as a batch of the first ones with padding on the right."""

    def __init__(self, model: Any, rows: int, piece: int, empty: Snapshot, max_length: int | None) -> None:
        self.model = model
        self.piece = piece
        self._tokens = torch.zeros(rows, piece, dtype=torch.long, device=model.device)
        self._starts = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
        self._lengths = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
        # Padding writes keys and values, too, behind those of the row.
        columns = None if max_length is None else max_length + piece
        self._cache = cache_of_rows(model, columns, self._starts)
        restore(self._cache, empty.fork(rows))
        self.states = RowStates(self._cache, empty)
        # Without softmax layers nothing reads the mask, but transformers' models would make one.
        self._mask = _CausalMask(model, self._cache, rows, columns or 1)
        self._passes: dict[int, CapturedStep] = {}

    def load(self, row: int, state: RowState | Snapshot | None) -> None:
        self.states.put(row, state)

    def take(self, row: int, num_tokens: int) -> RowState | Snapshot:
        return self.states.take(row, num_tokens)

    def run(self, pieces: Mapping[int, tuple[int, Sequence[int]]], size: int) -> Callable[[], None]:
        """As of `PromptRows`, in a pass over the first `size` rows."""
        self.prepare(size)
        given = [pieces.get(row, (0, ())) for row in range(size)]
        device = self._tokens.device
        self._tokens[:size].copy_(_on_device([self._padded(tokens) for _, tokens in given], device))
        self._starts[:size].copy_(_on_device([[start] for start, _ in given], device))
        self._lengths[:size].copy_(_on_device([[len(tokens)] for _, tokens in given], device))
        self._passes[size].replay()
        return wait_for(device)

    def _padded(self, tokens: Sequence[int]) -> list[int]:
        # Padding repeats the row's own last token, so no other token's weights can make the row's results wrong.
        last = tokens[-1] if tokens else 0
        return [*tokens, *[last] * (self.piece - len(tokens))]

    def prepare(self, size: int) -> None:
        """Capture the pass over the first `size` rows."""
        if size not in self._passes:
            cache = some_rows(self._cache, slice(size))
            self._passes[size] = CapturedStep(self.model, partial(self._run_all, size, cache), cache)

    def _run_all(self, size: int, cache: StaticCache) -> Tensor:
        starts, lengths = self._starts[:size], self._lengths[:size]
        sequences = RightPaddedSequences.from_lengths(lengths, self.piece)
        positions = starts + torch.arange(self.piece, device=starts.device)
        mask = self._mask.at(positions)
        batch = BatchDescription(sequences, positions, mask)
        arguments: dict[str, Any] = dict(position_ids=positions, attention_mask=mask, delta_batch=batch)
        results = self.model.base_model(self._tokens[:size], use_cache=True, **{CACHE: cache}, **arguments)
        return results.last_hidden_state


def _on_device(numbers: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Whole numbers on a device, without waiting for what it does."""
    on_host = torch.tensor(numbers, dtype=torch.long, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


class _CausalMask:
    """Ready masks for the softmax layers of a model: those that transformers makes wait for the device.

    Args:
        model: whose layers they are.
        cache: one of its caches.
        rows: of the cache.
        columns: of keys that the softmax layers hold; 1 if there are none.
    """

    def __init__(self, model: Any, cache: StaticCache, rows: int, columns: int) -> None:
        self._columns = torch.arange(columns, device=model.device)
        self._dtype = model.dtype if model.config._attn_implementation == "eager" else torch.bool
        token = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
        ready = prepared_inputs(model, token, cache, token.expand(rows, columns), token).get("attention_mask")
        self._layer_types = [*ready] if isinstance(ready, Mapping) else None
        """By which the model takes masks; None: it takes one for all layers."""

    def at(self, positions: Tensor) -> Tensor | dict[str, Tensor | None]:
        """For queries at positions `[N, T]`, which see all columns up to their own: `[N, 1, T, columns]`."""
        mask = self._columns <= positions[:, None, :, None]
        if self._dtype != torch.bool:
            mask = torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill_(
                ~mask, torch.finfo(self._dtype).min
            )
        if self._layer_types is None:
            return mask
        return {name: None if name == "linear_attention" else mask for name in self._layer_types}
