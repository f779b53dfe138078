"""A table of rows that begin and end on their own: the batch of a server.

    prompt -> PromptRows, piece by piece -> its state -> a row of RowTable -> step -> token -> step -> token ...

Shapes do not depend on what the rows are. A step computes the first rows of the table, as many as the smallest of a few
widths that holds the running ones; on a GPU a pass over pieces of prompts has one of a few sizes. At one width and one
size, what a row computes does not depend on the others, bit for bit; each width and size is one CUDA graph.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from deltazoo.generation.cache import DeltaRuleCacheLayer
from deltazoo.generation.capture_conditions import IMPLEMENTATIONS
from deltazoo.generation.decoder import check_model
from deltazoo.generation.read_later import read_later, wait_for
from deltazoo.generation.row_copies import RowCopies, RowState
from deltazoo.generation.row_keys import RowKeyValues
from deltazoo.generation.row_sampling import RowSampling, Way
from deltazoo.generation.sampling import Sampling
from deltazoo.generation.states import Snapshot, restore, snapshot
from deltazoo.generation.static_cache import fixed_cache, some_rows
from deltazoo.generation.step_capture import CapturedStep, capture
from deltazoo.layers import BatchDescription, RightPaddedSequences

__all__ = ["PromptRows", "RowTable", "has_softmax_layers"]

_log = logging.getLogger(__name__)


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
        self.sampling = RowSampling(rows, device)
        cache = _cache_of_rows(model, max_length, self.position)
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
        self.empty = snapshot(cache, rows=[0], num_tokens=0).with_tensors(torch.zeros_like)
        self._caches = {width: some_rows(cache, slice(width)) for width in self.widths}
        self._copies = RowCopies(cache) if RowCopies.serve(cache) else None
        self._beginning = self.empty if self._copies is None else self._copies.empty()
        self._steps: dict[int, CapturedStep] = {}
        self._draws: dict[tuple[int, Way], Callable[[], object]] = {}

    @torch.no_grad()
    def capture(self) -> None:
        """Prepare the steps of all widths; they are prepared at their first use otherwise."""
        for width in reversed(self.widths):
            for way in Way:
                self._prepare(width, way)

    @torch.no_grad()
    def put(
        self, row: int, state: RowState | Snapshot | None, token: int, position: int, sampling: Sampling, seed: int
    ) -> None:
        """Begin a row.

        Args:
            row: whose former contents are lost.
            state: of one row, after the tokens before `token`; None: there are none.
            token: the last one that is known; the next step continues from it.
            position: of that token in the row.
            sampling, seed: how the row's tokens are drawn.
        """
        state = self._beginning if state is None else state
        if isinstance(state, RowState):
            assert self._copies is not None
            self._copies.put(row, state)
        else:
            restore(self._caches[self.widths[-1]], state, rows=[row])
        self.token[row].fill_(token)
        self.position[row].fill_(position)
        self.sampling.put(row, sampling, seed)

    @torch.no_grad()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy some rows over others, which are not among them."""
        if self._copies is not None:
            self._copies.move(sources, targets)
        else:
            cache = self._caches[self.widths[-1]]
            num_tokens = 0 if self._columns is None else len(self._columns)
            restore(cache, snapshot(cache, rows=sources, num_tokens=num_tokens), rows=targets)
        for x in (self.token, self.position):
            for source, target in zip(sources, targets, strict=True):
                x[target].copy_(x[source])
        self.sampling.move(sources, targets)

    @torch.no_grad()
    def step(self, width: int, way: Way) -> None:
        """Compute the next token of the first `width` rows; `way` must be at least that of each row in use."""
        self._prepare(width, way)
        self._steps[width].replay()
        self._draws[width, way]()

    def read_tokens(self, width: int) -> Callable[[], Tensor]:
        """The tokens `[width]` of the last step; see `read_later`."""
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
            and their numbers `[M, count]`.
        """
        logits = torch.stack([self._logits(width)[row] for row in rows])
        chosen = torch.stack([self.token[row] for row in rows])
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
        return _forward(self.model, self.token[:width], cache, position, visible)

    def _draw(self, width: int, way: Way) -> None:
        self.sampling.choose(self._logits(width), self.position[:width], way, self.token[:width])

    def _logits(self, width: int) -> Tensor:
        return self._steps[width].output


class PromptRows:
    """A few rows in which prompts run piece by piece; the states after each piece can be taken out.

    Args:
        model: as for `RowTable`.
        sizes: numbers of rows that a pass can have.
        piece: most tokens of a row in one pass.
        empty: `RowTable.empty`.
        max_length: as for `RowTable`.
        padded: the rows of a pass are one batch, with `piece` tokens each, of which some are padding; on a GPU it is a
            CUDA graph for each size. Models with softmax layers, and transformers' own, have one row per pass then.
            Otherwise the rows run one by one, without padding.

    Raises:
        ValueError: a padded pass over several rows of such a model.
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
        rows = self.sizes[-1]
        # Padded rows are one batch. Rows that run one by one have caches of their own, with their own counts of tokens.
        # Padding writes keys and values, too, behind those of the row.
        columns = (max_length or 1) + piece * padded
        self._caches = [fixed_cache(model, columns) for _ in range(1 if padded else rows)]
        for cache in self._caches:
            restore(cache, empty.fork(rows) if padded else empty)
        together = RowCopies.serve(self._caches[0])
        if padded and rows > 1 and not together:
            raise ValueError(f"with softmax layers a padded pass has one row, got sizes={sizes}")
        self._mask = _CausalMask(model, self._caches[0], columns) if padded and not together else None
        self._copies = RowCopies(self._caches[0]) if padded and together else None
        self._beginning = empty if self._copies is None else self._copies.empty()
        self._tokens = torch.zeros(rows, piece, dtype=torch.long, device=model.device)
        self._starts = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
        self._lengths = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
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

        A model of others whose pass waits for the device has none from now on: its rows run without padding, and the
        log says so.
        """
        if not self.padded:
            return
        try:
            for size in reversed(self.sizes):
                self._prepare(size)
        except RuntimeError as error:
            if self._copies is not None:
                raise
            _log.warning("prompts run without CUDA graphs, which makes them slower: %s", error)
            self.padded = False

    @torch.no_grad()
    def load(self, row: int, state: RowState | Snapshot | None) -> None:
        """Continue a row from a state of this model's `PromptRows`; None: from the beginning."""
        state = self._beginning if state is None else state
        if isinstance(state, RowState):
            assert self._copies is not None
            self._copies.put(row, state)
        else:
            restore(self._caches[row], state)

    @torch.no_grad()
    def take(self, row: int, num_tokens: int) -> RowState | Snapshot:
        """The state of a row, which has had `num_tokens` tokens."""
        if self._copies is not None:
            return self._copies.take(row)
        return snapshot(self._caches[row], num_tokens=num_tokens)

    @torch.no_grad()
    def run(self, pieces: Mapping[int, tuple[int, Sequence[int]]]) -> Callable[[], None]:
        """Advance some rows; the contents of the others are lost.

        Args:
            pieces: by row: how many tokens the row has had, and at most `piece` further ones.

        Returns:
            A function that waits until the device has done it.
        """
        if not self.padded:
            for row, (start, tokens) in pieces.items():
                ids = self._on_device([tokens])
                positions = torch.arange(start, start + len(tokens), device=ids.device)[None]
                _forward(self.model, ids, self._caches[row], positions)
            return wait_for(self._tokens.device)
        size = self.size_for(max(pieces) + 1)
        self._prepare(size)
        given = [pieces.get(row, (0, ())) for row in range(size)]
        self._tokens[:size].copy_(self._on_device([self._padded(tokens) for _, tokens in given]))
        self._starts[:size].copy_(self._on_device([[start] for start, _ in given]))
        self._lengths[:size].copy_(self._on_device([[len(tokens)] for _, tokens in given]))
        self._passes[size].replay()
        return wait_for(self._tokens.device)

    def _padded(self, tokens: Sequence[int]) -> list[int]:
        # Padding repeats the row's own last token, so no other token's weights can make the row's results wrong.
        last = tokens[-1] if tokens else 0
        return [*tokens, *[last] * (self.piece - len(tokens))]

    def _prepare(self, size: int) -> None:
        if size not in self._passes:
            cache = some_rows(self._caches[0], slice(size))
            self._passes[size] = CapturedStep(self.model, partial(self._run_all, size, cache), cache)

    def _run_all(self, size: int, cache: StaticCache) -> Tensor:
        starts, lengths = self._starts[:size], self._lengths[:size]
        sequences = RightPaddedSequences.from_lengths(lengths, self.piece)
        positions = starts + torch.arange(self.piece, device=starts.device)
        mask: dict[str, Any] = {}
        if self._mask is not None:
            _set_count(cache, starts[0, 0])
            mask = self._mask.arguments(positions)
        batch = BatchDescription(sequences, positions, mask.get("attention_mask"))
        arguments = dict(past_key_values=cache, position_ids=positions, use_cache=True, delta_batch=batch, **mask)
        results = self.model.base_model(self._tokens[:size], **arguments)
        if self._mask is not None:
            _set_count(cache, starts[0, 0] + lengths[0, 0])
        return results.last_hidden_state

    def _on_device(self, numbers: Sequence[Sequence[int]]) -> Tensor:
        device = self._tokens.device
        on_host = torch.tensor(numbers, dtype=torch.long, pin_memory=device.type == "cuda")
        return on_host.to(device, non_blocking=True)


class _CausalMask:
    """Ready masks for the softmax layers of a model: those that transformers makes wait for the device.

    Args:
        model: whose layers they are.
        cache: one of its caches, of one row.
        columns: of keys that the softmax layers hold.
    """

    def __init__(self, model: Any, cache: StaticCache, columns: int) -> None:
        self._columns = torch.arange(columns, device=model.device)
        self._dtype = model.dtype if model.config._attn_implementation == "eager" else torch.bool
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        inputs = model.prepare_inputs_for_generation(
            token, past_key_values=cache, position_ids=token, attention_mask=token.expand(1, columns), use_cache=True
        )
        ready = inputs.get("attention_mask")
        self._layer_types = [*ready] if isinstance(ready, Mapping) else None
        """By which the model takes masks; None: it takes one for all layers."""

    def arguments(self, positions: Tensor) -> dict[str, Any]:
        """For queries at positions `[1, T]`, which see all columns up to their own."""
        mask = self._columns <= positions[:, None, :, None]
        if self._dtype != torch.bool:
            mask = torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill_(
                ~mask, torch.finfo(self._dtype).min
            )
        if self._layer_types is None:
            return {"attention_mask": mask}
        return {"attention_mask": {name: None if name == "linear_attention" else mask for name in self._layer_types}}


def _set_count(cache: StaticCache, num_tokens: Tensor) -> None:
    """Let a cache of one row have this many tokens."""
    for layer in cache.layers:
        if isinstance(layer, StaticLayer):
            layer.cumulative_length.copy_(num_tokens)
        elif isinstance(layer, DeltaRuleCacheLayer) and isinstance(layer.num_tokens, Tensor):
            layer.num_tokens.copy_(num_tokens)


@contextmanager
def _experts_apart(model: Any) -> Iterator[None]:
    """Multiply each token by its experts' matrices alone: products over all tokens of an expert depend on the others.

    Older versions of transformers cannot switch.
    """
    can_switch = getattr(model, "_can_set_experts_implementation", None)
    before = model.config._experts_implementation if can_switch is not None and can_switch() else "batched_mm"
    if before == "batched_mm":
        yield
        return
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _cache_of_rows(model: Any, max_length: int | None, position: Tensor) -> StaticCache:
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


def _forward(
    model: Any, tokens: Tensor, cache: StaticCache, positions: Tensor, visible: Tensor | None = None
) -> Tensor:
    """Logits `[N, vocabulary]` after the last token of each row.

    Args:
        model: whose forward pass it is.
        tokens: `[N, T]`.
        cache: of these rows.
        positions: `[N, T]`, of the tokens in their rows.
        visible: `[N, max_length]`, 1 for columns of softmax layers that the token of a row may attend to; None: as many
            as the cache has counted.
    """
    options = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    inputs = model.prepare_inputs_for_generation(
        tokens, past_key_values=cache, attention_mask=visible, position_ids=positions, use_cache=True, **options
    )
    mask = inputs.get("attention_mask")
    if isinstance(mask, dict) and "linear_attention" in mask:  # columns are not tokens
        inputs["attention_mask"] = mask | {"linear_attention": None}
    return model(**inputs).logits[:, -1]
