"""States of a model as values: take them out of a cache, put them back, copy rows, keep them in a file.

A delta-rule layer's state has one size at any number of tokens, so a whole conversation can be set aside and continued
without running it again. `snapshot` copies everything a cache holds, `restore` puts it into that or another cache:

    saved = snapshot(cache)                      # all rows; an immutable copy
    restore(cache, saved)                        # the former contents, bit for bit

    row = snapshot(batch, rows=[3])              # row 3 of a batch, as a batch of one
    restore(batch, row, rows=[5])                # row 5 becomes a copy of it; other rows are not touched
    restore(DynamicCache(config=config), saved.fork(4))  # four copies of each row, for samples or beams

A cache is a `DynamicCache`, or a `StaticCache`, whose tensors stay at their addresses, so that captured steps remain
valid; contents move between the two. It may belong to our models, swapped or accelerated ones.

Rows may differ in length. Linear layers allow any lengths. Softmax layers of hybrids have one count of tokens for the
whole batch, and rows end at the same place, with padding on the left: `restore(..., rows=...)` takes rows of at most as
many tokens as the batch, and leaves zeros before them, which the caller's attention mask must hide.
`snapshot(..., rows=[i], num_tokens=n)` copies the last n tokens of a row, without the padding before them.
`Snapshot.padded` makes room in a batch for a longer row. The caller keeps positions, masks and tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from deltazoo.generation.cache import DeltaRuleCacheLayer, prepare_cache_layer
from deltazoo.generation.snapshots import PER_TOKEN, Snapshot, Tensors, row_numbers
from deltazoo.generation.static_cache import RowKeyValues
from deltazoo.layers.state import LayerState

__all__ = ["KINDS", "RowStates", "Snapshot", "detach", "fork", "move_cache", "restore", "snapshot"]

KINDS: Mapping[type[Any], str] = {
    DeltaRuleCacheLayer: "delta_rule",
    LinearAttentionLayer: "linear",
    DynamicLayer: "softmax",
    DynamicSlidingWindowLayer: "softmax",
    StaticLayer: "softmax",
    RowKeyValues: "softmax",
}
"""Kinds of cache layers by their exact class, since a subclass may hold more: ours; transformers' layer with a
convolution window and a recurrent state, which accelerated models keep; keys and values, growing or static."""


def snapshot(cache: Cache, rows: Sequence[int] | Tensor | None = None, *, num_tokens: int | None = None) -> Snapshot:
    """An immutable copy of the contents of a cache, on its device.

    Args:
        cache: cache of any model with delta-rule layers, used or not.
        rows: numbers of rows of the batch, in this order; None: all.
        num_tokens: number of tokens of these rows, if the batch counts more because of padding on the left; softmax
            layers give the keys and values of the last ones. None: as many as the cache has seen.

    Raises:
        ValueError: a layer of an unknown kind, a row that does not exist, more tokens than the cache has.
    """
    whole = _contents(cache, num_tokens)
    return whole.with_tensors(torch.clone) if rows is None else whole.select(rows)


def _contents(cache: Cache, num_tokens: int | None = None) -> Snapshot:
    """A snapshot with the tensors of a cache themselves, without copies; see `snapshot`."""
    counts = [_tokens_of(layer) for layer in cache.layers if _kind_of(layer) != "linear"]
    seen = max(counts, default=0)
    if num_tokens is None:
        num_tokens = seen
    if not isinstance(num_tokens, int) or num_tokens < 0 or (counts and num_tokens > seen):
        raise ValueError(
            f"num_tokens must be a whole number between 0 and the {seen} tokens of the cache, got {num_tokens}"
        )
    layers: list[Tensors] = [_tensors_of(layer) for layer in cache.layers]
    for index, tensors in enumerate(layers):
        if "keys" in tensors and tensors["keys"].shape[2] > num_tokens:
            layers[index] = {name: x[:, :, x.shape[2] - num_tokens :] for name, x in tensors.items()}
    return Snapshot(tuple(map(_kind_of, cache.layers)), tuple(layers), num_tokens)


def restore(cache: Cache, saved: Snapshot, rows: Sequence[int] | Tensor | None = None) -> None:
    """Put states into a cache, in place, instead of its contents or the contents of some rows.

    The cache gets copies on its own device (an empty one on that of the snapshot), in tensors at the same addresses if
    it is a `StaticCache`. An error leaves the cache unchanged.

    Args:
        cache: a cache of the same model, used or empty.
        saved: result of `snapshot` or `Snapshot.load`.
        rows: rows of the cache that get the snapshot's rows, in this order; None: the snapshot becomes the whole batch.

    Raises:
        ValueError: other layers, shapes or dtypes than the cache has; rows that do not fit. A static cache keeps its
            number of rows.
    """
    _make_ready(cache, saved)
    held = _contents(cache)
    index = None if rows is None else row_numbers(rows, held.num_rows)
    if index is not None and (len(index) != saved.num_rows or len(index.unique()) != len(index)):
        raise ValueError(f"{saved.num_rows} rows need as many different places, got rows={index.tolist()}")
    for number, (layer, kind, tensors) in enumerate(zip(cache.layers, saved.kinds, saved.layers, strict=True)):
        reason = _why_not_fill(layer, kind, tensors, saved.num_tokens, rows_only=index is not None)
        if reason is not None:
            raise ValueError(f"the states do not fit layer {number} of the cache: {reason}")
    layers = [_like(new, old, index) for new, old in zip(saved.layers, held.layers, strict=True)]
    cache.reset()
    for layer, tensors in zip(cache.layers, layers, strict=True):
        _fill(layer, tensors, saved.num_tokens if index is None else held.num_tokens, cache.layers)


def _like(new: Tensors, held: Tensors, rows: Tensor | None) -> Tensors:
    """New contents of a layer on its device; with `rows`, its present contents with these rows replaced."""
    if not held:
        return new
    new = {name: x.to(next(iter(held.values())).device) for name, x in new.items()}
    if rows is None:
        return new
    missing = {name: held[name].shape[2] - x.shape[2] if name in PER_TOKEN else 0 for name, x in new.items()}
    padded = {name: F.pad(x, (0, 0, missing[name], 0)) if missing[name] else x for name, x in new.items()}
    return {name: x.index_copy(0, rows.to(x.device), padded[name]) for name, x in held.items()}


def _make_ready(cache: Cache, saved: Snapshot) -> None:
    """Give an empty cache the layers of the snapshot; ValueError if it has others."""
    if cache.layer_class_to_replicate is not None:
        cache.layers.extend(cache.layer_class_to_replicate() for _ in range(len(saved.layers) - len(cache.layers)))
    if len(cache.layers) != len(saved.layers):
        raise ValueError(
            f"the cache has {len(cache.layers)} layers and the states are of {len(saved.layers)}: they belong to "
            "another model"
        )
    for number, kind in enumerate(saved.kinds):
        if kind == "delta_rule":
            prepare_cache_layer(cache, number)


def _why_not_fill(layer: Any, kind: str, tensors: Tensors, num_tokens: int, *, rows_only: bool) -> str | None:
    """The reason why tensors cannot be the contents of a layer, or with `rows_only` some rows; None if they can."""
    if _kind_of(layer) != kind:
        return f"a {kind} layer's contents do not fit a {type(layer).__name__}"
    held = _tensors_of(layer)
    if rows_only and held.keys() != tensors.keys():
        given, present = (" and ".join(x) or "nothing" for x in (tensors, held))
        return f"rows of {given} cannot join {present}"
    is_static = isinstance(layer, StaticLayer) or (isinstance(layer, DeltaRuleCacheLayer) and layer.static)
    for name in held.keys() & tensors.keys():
        new, old = tensors[name], held[name]
        sizes = [[*x.shape[1:2], *x.shape[3:]] if kind == "softmax" else [*x.shape[1:]] for x in (new, old)]
        if sizes[0] != sizes[1] or new.dtype != old.dtype:
            return f"{name} of shape {tuple(new.shape)}, {new.dtype}, meets shape {tuple(old.shape)}, {old.dtype}"
        if is_static and not rows_only and len(new) != len(old):
            return f"{len(new)} rows cannot take the place of {len(old)} at fixed addresses"
    if kind == "softmax" and rows_only and num_tokens > _tokens_of(layer):
        return (
            f"a row of {num_tokens} tokens cannot join a batch of {_tokens_of(layer)}: softmax layers align rows at "
            "the last token"
        )
    if isinstance(layer, StaticLayer) and num_tokens > layer.max_cache_len:
        return f"{num_tokens} tokens do not fit max_cache_len={layer.max_cache_len}"
    if type(layer) is DynamicLayer and tensors and tensors["keys"].shape[2] != num_tokens and not rows_only:
        return f"a window of {tensors['keys'].shape[2]} of {num_tokens} tokens does not fit a layer that keeps all"
    return None


def _fill(layer: Any, tensors: Tensors, num_tokens: int, others: Iterable[Any]) -> None:
    """Copy tensors of `num_tokens` tokens to a layer after its `reset`; a static layer keeps its addresses."""
    kind = _kind_of(layer)
    if kind == "softmax" and not isinstance(layer, StaticLayer):
        layer.keys = layer.values = None  # older versions of transformers leave zeros at a reset
        layer.is_initialized = False
    if not tensors:
        return
    if kind == "delta_rule":
        copies = {name: x.clone() for name, x in tensors.items()}
        layer.store(LayerState(*map(copies.get, LayerState._fields)), num_tokens, others)  # type: ignore[arg-type]
    elif kind == "linear":
        conv, recurrent = tensors["conv"], tensors["recurrent"]
        if layer.is_recurrent_states_initialized[0] and layer.recurrent_states[0].shape != recurrent.shape:
            layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = False  # new batch
        layer.update_conv_state(conv.clone(), conv_kernel_size=conv.shape[-1])
        layer.update_recurrent_state(recurrent)
    else:
        # A window holds the last keys alone; they get their positions among all keys.
        before = num_tokens - tensors["keys"].shape[2]
        if isinstance(layer, StaticLayer):
            if not layer.is_initialized:
                layer.lazy_initialization(tensors["keys"], tensors["values"])
            layer.cumulative_length.fill_(before)
        elif isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = before
        layer.update(tensors["keys"], tensors["values"])


def move_cache(source: Cache, target: Cache) -> None:
    """Move the contents of a dynamic cache to an empty static one, layer by layer; the dynamic cache is empty then."""
    source.layers, layers = [], source.layers
    layers.reverse()
    for new in target.layers:
        old = layers.pop()  # frees its memory before the next layer moves
        _fill(new, _tensors_of(old), _tokens_of(old), target.layers)


def fork(cache: Cache, n: int) -> None:
    """Repeat every row n times, copies side by side, in place; a static cache cannot: restore a fork into another."""
    restore(cache, snapshot(cache).fork(n))


def detach(cache: Cache) -> Cache:
    """The cache, detached: no gradient flows through it to the tokens so far.

    Truncated backpropagation through time needs it: a pass over further tokens starts from the same states, and its
    `backward()` stops there. The cache is changed in place, and nothing is copied.

    Args:
        cache: cache of any model with delta-rule layers, used or not.

    Raises:
        ValueError: a layer of an unknown kind.
    """
    for layer in cache.layers:
        _kind_of(layer)  # another kind may keep tensors elsewhere
        for held in (vars(layer), getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            for name, x in held.items():
                if isinstance(x, Tensor) and x.requires_grad:
                    held[name] = x.detach()
    return cache


def _kind_of(layer: Any) -> str:
    """The kind of a cache layer; ValueError for one that is not known here."""
    kind = KINDS.get(type(layer))
    if kind is None or getattr(layer, "number_of_states", 1) != 1:
        known = ", ".join(cls.__name__ for cls in KINDS)
        raise ValueError(f"the contents of a {type(layer).__name__} cannot be taken out of a cache; known: {known}")
    return kind


def _tensors_of(layer: Any) -> dict[str, Tensor]:
    """The tensors of a layer, not copied."""
    kind = _kind_of(layer)
    if kind == "delta_rule":
        state = {} if layer.state is None else layer.state._asdict()
        return {name: x for name, x in state.items() if x is not None}
    if kind == "linear":
        held = layer.has_previous_state[0]
        return {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]} if held else {}
    if not layer.is_initialized:
        return {}
    num_tokens = _tokens_of(layer) if isinstance(layer, StaticLayer) else layer.keys.shape[2]
    return {"keys": layer.keys[:, :, :num_tokens], "values": layer.values[:, :, :num_tokens]}


def _tokens_of(layer: Any) -> int:
    """Number of tokens that a layer has seen; 0 for "linear" layers, which do not count. A static layer waits."""
    return 0 if _kind_of(layer) == "linear" else int(layer.get_seq_length())


class RowStates:
    """Single rows of a static cache as snapshots, with one launch per dtype for the states of all layers.

    Args:
        cache: a filled cache, whose tensors stay at their addresses. Its softmax layers, if any, are `RowKeyValues`:
            the keys of a row begin at column 0.

    Attributes:
        recurrent: whether all layers are delta-rule layers, so that a row takes the same memory at any length.
    """

    def __init__(self, cache: Cache) -> None:
        self._kinds = tuple(map(_kind_of, cache.layers))
        self.recurrent = {*self._kinds} == {"delta_rule"}
        held = [_tensors_of(layer) for layer in cache.layers]
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
