"""Rows that begin and end on their own: the batch of a server, and the rows in which prompts run before.

    prompt -> PromptRows, piece by piece -> its state -> a row of RowTable -> step -> token -> step -> token ...

Shapes do not depend on the rows. A step computes the first rows of the table, as many as the smallest of a few widths
that holds the running ones. On a GPU the rows of a pass over pieces of prompts are one batch of one of a few sizes,
with pieces padded on the right. At one width and one size, the results of a row do not depend on the others, bit for
bit; each width and size is one CUDA graph.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticCache, StaticLayer

from deltazoo.generation.batch import BatchDescription
from deltazoo.generation.cache import CACHE, RowKeyValues
from deltazoo.generation.capture import capture, read_later, wait_for
from deltazoo.generation.conditions import check_model
from deltazoo.generation.sampling import Sampler, Sampling, Way
from deltazoo.generation.states import PER_TOKEN, Snapshot, kind_of, restore, tensors_of
from deltazoo.generation.static_cache import fixed_cache, some_rows
from deltazoo.generation.step import CapturedStep, next_logits, prepared_inputs
from deltazoo.layers import RightPaddedSequences, describe_sequences

_log = logging.getLogger(__name__)


def has_softmax_layers(model: Any) -> bool:
    """Whether rows of a model take memory for every token; ValueError if no captured step can work on its cache."""
    return any(isinstance(layer, StaticLayer) for layer in fixed_cache(model, 1).layers)


class RowTable:
    """Rows that continue by one token per step, each with its own past and its own sampling.

    Args:
        model: see `Decoder`, without sliding windows in softmax layers. It must not change.
        widths: numbers of rows that a step can have; the largest is the size of the table.
        max_length: most tokens of a row, for which softmax layers reserve keys and values. Models that read no
            positions need none.

    Attributes:
        widths: the widths in ascending order.
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
        cache = fixed_cache(model, max_length, self.position)
        lengths = [layer.max_cache_len for layer in cache.layers if isinstance(layer, RowKeyValues)]
        self._columns = torch.arange(lengths[0], device=device) if lengths else None
        try:
            with torch.no_grad():
                self._forward(cache, rows)  # creates the tensors of the cache
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
            row: number of the row, whose former contents are lost.
            state: state of one row after the tokens before `token`; None: there are none.
            token: the last known token, from which the next step continues.
            position: position of that token in the row.
            sampling, seed: settings and seed of the row's draws.
        """
        self._states.put(row, state)
        self.token[row].fill_(token)
        self.position[row].fill_(position)
        self.sampler.put(row, sampling, seed)

    @torch.no_grad()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over other rows, of which none is a source."""
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
        """Log-probabilities of the last step's tokens, before temperature and filters.

        Args:
            width: width of the step.
            rows: numbers of M rows.
            count: number of the likeliest tokens to read.

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


class RowStates:
    """Single rows of a static cache as snapshots, with one launch per dtype for the states of all layers.

    Args:
        cache: a filled cache, whose tensors stay at their addresses. Its softmax layers, if any, are `RowKeyValues`:
            the keys of a row begin at column 0.

    Attributes:
        recurrent: whether all layers are delta-rule layers, so that a row takes the same memory at any length.
    """

    def __init__(self, cache: Cache) -> None:
        self._kinds = tuple(map(kind_of, cache.layers))
        self.recurrent = {*self._kinds} == {"delta_rule"}
        held = [tensors_of(layer) for layer in cache.layers]
        groups: dict[object, list[tuple[int, str]]] = {}
        for number, tensors in enumerate(held):
            for name, x in tensors.items():
                groups.setdefault((x.dtype, x.device, name in PER_TOKEN), []).append((number, name))
        self._groups = [*groups.values()]
        rows = min(len(x) for tensors in held for x in tensors.values())
        # Views are made once, since a view takes as long as a launch, and each layer has two.
        self._views = [
            [[held[number][name][row : row + 1] for number, name in group] for row in range(rows)]
            for group in self._groups
        ]

    def take(self, row: int, num_tokens: int) -> Snapshot:
        """A copy of a row, which has had `num_tokens` tokens."""
        layers: tuple[dict[str, Tensor], ...] = tuple({} for _ in self._kinds)
        for group, rows in zip(self._groups, self._views, strict=True):
            views = _first_tokens(group, rows[row], num_tokens)
            copies = [torch.empty_like(x) for x in views]
            torch._foreach_copy_(copies, views)
            for (number, name), x in zip(group, copies, strict=True):
                layers[number][name] = x
        return Snapshot(self._kinds, layers, num_tokens)

    def put(self, row: int, state: Snapshot | None) -> None:
        """Replace a row by one that `take` returned, from this cache or another of the model; None: by an empty one."""
        for group, rows in zip(self._groups, self._views, strict=True):
            if state is None or group[0][1] in PER_TOKEN:  # keys after the row's end are hidden, and must not be NaN
                torch._foreach_zero_(rows[row])
            if state is not None:
                new = [state.layers[number][name] for number, name in group]
                torch._foreach_copy_(_first_tokens(group, rows[row], state.num_tokens), new)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Replace rows by others; no row is both a source and a target."""
        if sources:
            for rows in self._views:
                torch._foreach_copy_(
                    [x for row in targets for x in rows[row]], [x for row in sources for x in rows[row]]
                )


def _first_tokens(group: Sequence[tuple[int, str]], views: list[Tensor], count: int) -> list[Tensor]:
    """Views of tensors of one kind; keys and values end after `count` tokens."""
    return [x[:, :, :count] for x in views] if group[0][1] in PER_TOKEN else views


class PromptRows:
    """A few rows in which prompts run piece by piece; `take` copies the state of a row.

    Args:
        table: the table whose rows get the states.
        sizes: numbers of rows that a pass can have.
        piece: most tokens of a row in one pass.
        padded: whether the rows of a pass are one batch, with `piece` tokens each, of which some are padding; on a GPU
            that is a CUDA graph for each size. Otherwise the rows run one by one, without padding.
    """

    def __init__(self, table: RowTable, sizes: Sequence[int], piece: int, *, padded: bool) -> None:
        self.model = model = table.model
        self.sizes = tuple(sorted(set(sizes)))
        self.piece = piece
        self.padded = padded
        rows, device = self.sizes[-1], model.device
        self._tokens = torch.zeros(rows, piece, dtype=torch.long, device=device)
        self._starts = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._lengths = torch.zeros(rows, 1, dtype=torch.long, device=device)
        # Padding writes keys and values, too, after those of the row.
        columns = None if table.max_length is None else table.max_length + piece
        self._cache = fixed_cache(model, columns, self._starts)
        restore(self._cache, table.empty.fork(rows))
        self._states = RowStates(self._cache)
        # Without softmax layers nothing reads the mask, but transformers' models would make one.
        self._columns = torch.arange(columns or 1, device=device)
        token = self._tokens[:, :1]
        inputs = prepared_inputs(model, token, self._cache, token.expand(rows, len(self._columns)), token)
        masks = inputs.get("attention_mask")
        self._mask_types = [*masks] if isinstance(masks, Mapping) else None
        """The layer types by which the model takes masks; None: it takes one mask for all layers."""
        self._passes: dict[int, CapturedStep] = {}

    def best_count(self, waiting: int) -> int:
        """Number of waiting rows to run in the next pass: so many as fill a pass, if they fill any."""
        return max((size for size in self.sizes if size <= waiting), default=waiting)

    def size_for(self, count: int) -> int:
        """Size of a pass over `count` rows."""
        return next(size for size in self.sizes if size >= count)

    @torch.no_grad()
    def capture(self) -> None:
        """Prepare the passes of all sizes; they are prepared at their first use otherwise.

        If a pass of a model with softmax layers waits for the device, rows run one by one without padding from then on,
        and the log says so.
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
            pieces: by row, the number of tokens that it has had, and at most `piece` further tokens.

        Returns:
            A function that waits until the device has finished.
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
        """The model's output for the pieces of some rows, padded unless all have `length` tokens."""
        starts, num_tokens = self._starts[rows], length or self.piece
        positions = starts + torch.arange(num_tokens, device=starts.device)
        sequences = (
            RightPaddedSequences.from_lengths(self._lengths[rows], num_tokens)
            if length is None
            else describe_sequences(len(starts), length)
        )
        mask = self._mask(positions)
        batch = BatchDescription(sequences, positions, mask)
        arguments: dict[str, Any] = dict(position_ids=positions, attention_mask=mask, delta_batch=batch)
        tokens = self._tokens[rows, :num_tokens]
        return self.model.base_model(tokens, use_cache=True, **{CACHE: cache}, **arguments).last_hidden_state

    def _mask(self, positions: Tensor) -> Tensor | dict[str, Tensor | None]:
        """Ready masks `[N, 1, T, columns]` of softmax layers for queries at positions `[N, T]`, alone or by layer type.

        transformers waits for the device to make its own.
        """
        mask = self._columns <= positions[:, None, :, None]
        if self.model.config._attn_implementation == "eager":
            dtype = self.model.dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
        if self._mask_types is None:
            return mask
        return {name: None if name == "linear_attention" else mask for name in self._mask_types}


def _on_device(numbers: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Whole numbers on a device, without waiting for its work."""
    on_host = torch.tensor(numbers, dtype=torch.long, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


@contextmanager
def _experts_apart(model: Any) -> Iterator[None]:
    """A context in which every token is multiplied by its experts' matrices alone.

    One product for all tokens of an expert would make the results of a row depend on the others.
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
