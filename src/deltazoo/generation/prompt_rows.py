"""Prompts that run piece by piece, a few at a time: the states after them become rows of a table.

On a GPU the rows of a pass are one batch. Its shape does not depend on how long the prompts are, since pieces are
padded on the right; so a pass is one CUDA graph.
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
from deltazoo.generation.capture import wait_for
from deltazoo.generation.row_table import cache_of_rows
from deltazoo.generation.states import RowStates, Snapshot, restore
from deltazoo.generation.static_cache import some_rows
from deltazoo.generation.step import CapturedStep, prepared_inputs
from deltazoo.layers import RightPaddedSequences, describe_sequences

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
        self.model = model
        self.sizes = tuple(sorted(set(sizes)))
        self.piece = piece
        self.padded = padded
        rows, device = self.sizes[-1], model.device
        self._tokens = torch.zeros(rows, piece, dtype=torch.long, device=device)
        self._starts = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._lengths = torch.zeros(rows, 1, dtype=torch.long, device=device)
        # Padding writes keys and values, too, behind those of the row.
        columns = None if max_length is None else max_length + piece
        self._cache = cache_of_rows(model, columns, self._starts)
        restore(self._cache, empty.fork(rows))
        self._states = RowStates(self._cache)
        # Without softmax layers nothing reads the mask, but transformers' models would make one.
        self._mask = _CausalMask(model, self._cache, rows, columns or 1)
        self._passes: dict[int, CapturedStep] = {}

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
        try:
            for size in reversed(self.sizes) if self.padded else ():
                self._prepare(size)
        except RuntimeError as error:
            if self._states.recurrent:
                raise
            _log.warning("prompts run one by one and without CUDA graphs, which makes them slower: %s", error)
            self.padded = False
            self._passes.clear()

    @torch.no_grad()
    def load(self, row: int, state: Snapshot | None) -> None:
        """Continue a row from a state of this model's `PromptRows`; None: from the beginning."""
        self._states.put(row, state)

    @torch.no_grad()
    def take(self, row: int, num_tokens: int) -> Snapshot:
        """The state of a row, which has had `num_tokens` tokens."""
        return self._states.take(row, num_tokens)

    @torch.no_grad()
    def run(self, pieces: Mapping[int, tuple[int, Sequence[int]]]) -> Callable[[], None]:
        """Advance some rows; the contents of the others are lost.

        Args:
            pieces: by row: how many tokens the row has had, and at most `piece` further ones.

        Returns:
            A function that waits until the device has done it.
        """
        size, device = self.size_for(max(pieces) + 1), self.model.device
        given = [pieces.get(row, (0, ())) for row in range(size)]
        self._tokens[:size].copy_(_on_device([self._padded(tokens) for _, tokens in given], device))
        self._starts[:size].copy_(_on_device([[start] for start, _ in given], device))
        if self.padded:
            self._lengths[:size].copy_(_on_device([[len(tokens)] for _, tokens in given], device))
            self._prepare(size)
            self._passes[size].replay()
        else:
            for row, (_, tokens) in pieces.items():
                self._forward(slice(row, row + 1), some_rows(self._cache, slice(row, row + 1)), len(tokens))
        return wait_for(device)

    def _padded(self, tokens: Sequence[int]) -> list[int]:
        # Padding repeats the row's own last token, so no other token's weights can make the row's results wrong.
        last = tokens[-1] if tokens else 0
        return [*tokens, *[last] * (self.piece - len(tokens))]

    def _prepare(self, size: int) -> None:
        """Capture the pass over the first `size` rows."""
        if size not in self._passes:
            cache = some_rows(self._cache, slice(size))
            self._passes[size] = CapturedStep(self.model, partial(self._forward, slice(size), cache), cache)

    def _forward(self, rows: slice, cache: StaticCache, length: int | None = None) -> Tensor:
        """The model over the pieces of some rows, padded unless all have `length` tokens."""
        starts, num_tokens = self._starts[rows], length or self.piece
        positions = starts + torch.arange(num_tokens, device=starts.device)
        sequences = (
            RightPaddedSequences.from_lengths(self._lengths[rows], num_tokens)
            if length is None
            else describe_sequences(len(starts), length)
        )
        mask = self._mask.at(positions)
        batch = BatchDescription(sequences, positions, mask)
        arguments: dict[str, Any] = dict(position_ids=positions, attention_mask=mask, delta_batch=batch)
        tokens = self._tokens[rows, :num_tokens]
        return self.model.base_model(tokens, use_cache=True, **{CACHE: cache}, **arguments).last_hidden_state


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
