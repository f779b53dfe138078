"""A table of rows that begin and end on their own: the batch of a server.

    prompt -> PromptRows, piece by piece -> its state -> a row of RowTable -> step -> token -> step -> token ...

Shapes do not depend on what the rows are. A step computes the first rows of the table, as many as the smallest of a few
widths that holds the running ones; on a GPU a pass over pieces of prompts has one of a few sizes. At one width and one
size, what a row computes does not depend on the others, bit for bit; each width and size is one CUDA graph.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from deltazoo.generation.cache import DeltaRuleCacheLayer, RowKeyValues
from deltazoo.generation.capture import capture, read_later
from deltazoo.generation.conditions import IMPLEMENTATIONS, check_model
from deltazoo.generation.sampling import Sampler, Sampling, Way
from deltazoo.generation.states import RowStates, Snapshot
from deltazoo.generation.static_cache import fixed_cache, some_rows
from deltazoo.generation.step import CapturedStep, next_logits

__all__ = ["RowTable", "cache_of_rows", "has_softmax_layers"]


def has_softmax_layers(model: Any) -> bool:
    """Whether rows of a model take memory for every token; ValueError if no captured step can work on its cache."""
    return any(isinstance(layer, StaticLayer) for layer in fixed_cache(model, 1).layers)


class RowTable:
    """Rows that continue by one token per step, each with its own past and its own sampling.

    Args:
        model: as for `Decoder`, without sliding windows in softmax layers. It must not change.
        widths: numbers of rows that a step can have; the largest is the size of the table.
        max_length: tokens of a row at most, for which softmax layers reserve keys and values. Models that read no
            positions need none.

    Attributes:
        widths: in ascending order.
        empty: the states of a row before its first token.

    Raises:
        ValueError: a model that the table cannot run.
    """

    def __init__(self, model: Any, widths: Sequence[int], max_length: int | None = None) -> None:
        check_model(model)
        self.model = model
        self.max_length = max_length
        self.widths = tuple(sorted(set(widths)))
        rows, device = self.widths[-1], model.device
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.sampler = Sampler(rows, device)
        cache = cache_of_rows(model, max_length, self.position)
        lengths = [layer.max_cache_len for layer in cache.layers if isinstance(layer, RowKeyValues)]
        self._columns = torch.arange(lengths[0], device=device) if lengths else None
        try:
            with torch.no_grad():
                self._forward(cache, rows)  # makes the tensors of the cache
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"{rows} rows, with keys and values of {max_length or 0} tokens each, do not fit into the device's "
                "memory: take fewer rows or shorter ones"
            ) from error
        self._caches = {width: some_rows(cache, slice(width)) for width in self.widths}
        self._states = RowStates(cache)
        self.empty = self._states.take(0, 0).with_tensors(torch.zeros_like)
        self._steps: dict[int, CapturedStep] = {}
        self._draws: dict[tuple[int, Way], Callable[[], object]] = {}

    @torch.no_grad()
    def capture(self) -> None:
        """Prepare the steps of all widths; they are prepared at their first use otherwise."""
        for width in reversed(self.widths):
            for way in Way:
                self._prepare(width, way)

    @torch.no_grad()
    def put(self, row: int, state: Snapshot | None, token: int, position: int, sampling: Sampling, seed: int) -> None:
        """Begin a row.

        Args:
            row: whose former contents are lost.
            state: of one row, after the tokens before `token`; None: there are none.
            token: the last one that is known; the next step continues from it.
            position: of that token in the row.
            sampling, seed: how the row's tokens are drawn.
        """
        self._states.put(row, state)
        self.token[row].fill_(token)
        self.position[row].fill_(position)
        self.sampler.put(row, sampling, seed)

    @torch.no_grad()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy some rows over others, which are not among them."""
        self._states.move(sources, targets)
        for x in (self.token, self.position):
            for source, target in zip(sources, targets, strict=True):
                x[target].copy_(x[source])
        self.sampler.move(sources, targets)

    @torch.no_grad()
    def step(self, width: int, way: Way) -> None:
        """Compute the next token of the first `width` rows; `way` must be at least that of each row in use."""
        self._prepare(width, way)
        self._steps[width].replay()
        self._draws[width, way]()

    def read_tokens(self, width: int) -> Callable[[], Tensor]:
        """The tokens `[width]` of the last step, `NO_TOKEN` in rows of NaN; see `read_later`."""
        return read_later(self.token[:width, 0])

    @torch.no_grad()
    def read_log_probabilities(self, width: int, rows: Sequence[int], count: int) -> Callable[[], tuple[Tensor, ...]]:
        """Of the last step's tokens, before temperature and filters.

        Args:
            width: of the step.
            rows: M of them.
            count: how many of the likeliest tokens to read.

        Returns:
            A function that waits for log-probabilities `[M]` of the chosen tokens, `[M, count]` of the likeliest ones
            and their numbers `[M, count]`; they mean nothing in rows of NaN.
        """
        logits = torch.stack([self._steps[width].output[row] for row in rows])
        chosen = torch.stack([self.token[row] for row in rows]).clamp(min=0)
        values = logits.float().log_softmax(-1)
        likeliest = values.topk(min(count, values.shape[-1]), dim=-1)
        readers = [read_later(x) for x in (values.gather(-1, chosen)[:, 0], likeliest.values, likeliest.indices)]
        return lambda: tuple(read() for read in readers)

    def _prepare(self, width: int, way: Way) -> None:
        if width not in self._steps:
            cache = self._caches[width]
            self._steps[width] = CapturedStep(
                self.model, partial(self._advance, width, cache), cache, [self.position[:width]]
            )
        if (width, way) not in self._draws:
            self._draws[width, way] = capture(partial(self._draw, width, way), [self.token[:width]])

    def _advance(self, width: int, cache: StaticCache) -> Tensor:
        with _experts_apart(self.model):
            logits = self._forward(cache, width)
        position = self.position[:width].add_(1)
        if self.max_length is not None:  # rows that are not in use go on, too
            position.clamp_(max=self.max_length - 1)
        return logits

    def _forward(self, cache: StaticCache, width: int) -> Tensor:
        position = self.position[:width]
        visible = None if self._columns is None else (self._columns <= position).long()
        return next_logits(self.model, self.token[:width], cache, visible, position)

    def _draw(self, width: int, way: Way) -> None:
        self.sampler.choose(self._steps[width].output, self.position[:width], way, self.token[:width])


@contextmanager
def _experts_apart(model: Any) -> Iterator[None]:
    """Within this context every token is multiplied by its experts' matrices alone.

    One product for all tokens of an expert would make what a row computes depend on the others.
    """
    before = model.config._experts_implementation
    if before == "batched_mm" or not model._can_set_experts_implementation():
        yield
        return
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def cache_of_rows(model: Any, max_length: int | None, position: Tensor) -> StaticCache:
    """An empty cache in which rows have their own lengths.

    Args:
        model: whose cache it is.
        max_length: see `RowTable`.
        position: see `RowKeyValues`.

    Raises:
        ValueError: a layer keeps its past in a way that such rows cannot share; `max_length` is missing.
    """
    if any(type(layer) is StaticSlidingWindowLayer for layer in StaticCache(model.config, max_cache_len=2).layers):
        raise ValueError("rows of their own lengths need softmax layers without sliding windows")
    cache = fixed_cache(model, max_length or 1)
    for index, layer in enumerate(cache.layers):
        if type(layer) is StaticLayer:
            if max_length is None:
                raise ValueError("max_length is needed: softmax layers reserve memory for every token")
            if model.config._attn_implementation not in IMPLEMENTATIONS:
                raise ValueError(
                    f"rows of their own lengths need masks, which softmax attention by "
                    f"{model.config._attn_implementation!r} does not take: {' or '.join(IMPLEMENTATIONS)} does"
                )
            cache.layers[index] = RowKeyValues(max_length, position)
    if max_length is not None:
        for layer in cache.layers:
            if isinstance(layer, DeltaRuleCacheLayer):  # older versions of transformers ask the first layer for a count
                layer.fix_count(torch.tensor(max_length, device=position.device))
    return cache
