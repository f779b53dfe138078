"""States of a model as values: take them out of a cache, put them back, copy rows, keep them in a file.

A delta-rule layer's state has one size at any number of tokens, so a whole conversation can be set aside and continued
without running it again. `snapshot` copies everything a cache holds, `restore` puts it into that or another cache:

    saved = snapshot(cache)                      # all rows; an immutable copy
    restore(cache, saved)                        # as it was, bit for bit

    row = snapshot(batch, rows=[3])              # row 3 of a batch, as a batch of one
    restore(batch, row, rows=[5])                # row 5 becomes a copy of it; other rows are not touched
    restore(DynamicCache(config=config), saved.fork(4))  # four copies of each row, for samples or beams

A cache is a `DynamicCache`, or a `StaticCache`, whose tensors stay at their addresses, so that captured steps go on;
contents move between the two. It may be of our models, swapped or accelerated ones.

Rows of different length. Linear layers do not care. Softmax layers of hybrids have one count of tokens for the whole
batch, and rows end at the same place, as with padding on the left: `restore(..., rows=...)` takes rows of at most as
many tokens as the batch, and leaves zeros before them, which the caller's attention mask must hide.
`snapshot(..., rows=[i], num_tokens=n)` takes the last n tokens of a row, without the padding before it.
`Snapshot.padded` makes room in a batch for a longer row. Positions, masks and tokens are the caller's.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache as cached
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from deltazoo.generation.cache import prepare_cache_layer
from deltazoo.generation.layer_contents import (
    Tensors,
    detach_contents,
    fill,
    fill_rows,
    kind_of,
    num_rows_of,
    tensors_of,
    tokens_of,
    why_not_fill,
)
from deltazoo.layers import DeltaRuleAttention
from deltazoo.spec import choice_name

__all__ = ["RowStates", "Snapshot", "detach", "fork", "restore", "snapshot"]

_FORMAT = "deltazoo states"
_VERSION = "2"
_NOT_OF_THE_MODEL = {"architectures", "dtype", "name_or_path", "torch_dtype", "transformers_version", "use_cache"}
"""Keys of a configuration that differ between copies of one model."""
_PER_TOKEN = ("keys", "values")
_PIECE = 2**22
"""Numbers of a weight that are rounded and hashed at once."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The states of all layers of a cache after some tokens. Nothing changes them: methods make new snapshots."""

    kinds: tuple[str, ...]
    """Of each layer: "delta_rule", "linear" or "softmax", see `deltazoo.generation.layer_contents`."""
    layers: tuple[Tensors, ...]
    """Tensors of each layer by name, rows first; none for a layer that holds nothing."""
    num_tokens: int
    """Tokens that the states are of, padding included."""

    @property
    def num_rows(self) -> int:
        """Rows of the batch; 0 before the first token."""
        return next((rows for rows in map(num_rows_of, self.layers) if rows is not None), 0)

    @property
    def nbytes(self) -> int:
        """Memory of all tensors."""
        return sum(x.nbytes for tensors in self.layers for x in tensors.values())

    @property
    def device(self) -> torch.device | None:
        """Of the first tensor; None before the first token."""
        return next((x.device for tensors in self.layers for x in tensors.values()), None)

    def select(self, rows: Sequence[int] | Tensor) -> "Snapshot":
        """The given rows, in that order, with repetitions if there are any; ValueError if there is no such row."""
        index_on = cached(_row_numbers(rows, self.num_rows).to)
        return self.with_tensors(lambda x: x.index_select(0, index_on(x.device)))

    def fork(self, n: int) -> "Snapshot":
        """Every row n times, copies side by side, as beams and parallel samples have them."""
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        return self.select(torch.arange(self.num_rows).repeat_interleave(n))

    def padded(self, num_tokens: int) -> "Snapshot":
        """With zeros before the keys and values of softmax layers, so that they are of `num_tokens` tokens.

        Masks must hide the new tokens, as they hide padding on the left. Linear layers stay as they are.

        Raises:
            ValueError: there are more tokens already, or a softmax layer holds a window of them.
        """
        missing = num_tokens - self.num_tokens
        lengths = {tensors["keys"].shape[2] for tensors in self.layers if "keys" in tensors}
        if missing < 0 or lengths - {self.num_tokens}:
            raise ValueError(f"{self.num_tokens} tokens, of which layers hold {lengths}, cannot become {num_tokens}")
        layers = tuple(
            {name: F.pad(x, (0, 0, missing, 0)) if name in _PER_TOKEN else x for name, x in tensors.items()}
            for tensors in self.layers
        )
        return replace(self, layers=layers, num_tokens=num_tokens)

    def to(self, device: torch.device | str) -> "Snapshot":
        """The same on another device, for instance "cpu" for states that are not needed now."""
        return self.with_tensors(lambda x: x.to(device))

    def with_tensors(self, function: Callable[[Tensor], Tensor]) -> "Snapshot":
        """The same with what a function makes of each tensor."""
        layers = tuple({name: function(x) for name, x in tensors.items()} for tensors in self.layers)
        return replace(self, layers=layers)

    def save(self, path: str | PathLike[str], model: PreTrainedModel) -> None:
        """Write a safetensors file that `load` accepts for this model alone. All weights are read, to identify it.

        Args:
            path: of the file.
            model: whose states these are.

        Raises:
            ValueError: the model's weights are not in memory.
        """
        tensors = {
            f"{index}.{name}": x.contiguous() for index, layer in enumerate(self.layers) for name, x in layer.items()
        }
        header = {"format": _FORMAT, "version": _VERSION, "num_tokens": str(self.num_tokens)}
        draft = Path(f"{path}.part")  # a process that is killed leaves no half file
        save_file(tensors, draft, header | {"kinds": json.dumps(self.kinds)} | _identity(model))
        draft.replace(path)

    @classmethod
    def load(cls, path: str | PathLike[str], model: PreTrainedModel, device: torch.device | str = "cpu") -> "Snapshot":
        """Read what `save` has written. All weights of the model are read, to compare it.

        Args:
            path: of the file.
            model: that will continue from the states.
            device: of the tensors.

        Raises:
            ValueError: another kind of file, a part of one, another version of the format, or states of a model with
                another configuration, other rules or other weights.
        """
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                header = file.metadata() or {}
                _check_header(header, model, path)
                kinds = tuple(json.loads(header["kinds"]))
                layers: tuple[dict[str, Tensor], ...] = tuple({} for _ in kinds)
                for key in file.keys():  # noqa: SIM118 (no dict)
                    index, name = key.split(".")
                    layers[int(index)][name] = file.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{path} is no whole safetensors file: {error}") from error
        return cls(kinds, layers, int(header["num_tokens"]))


def _check_header(header: dict[str, str], model: PreTrainedModel, path: object) -> None:
    if header.get("format") != _FORMAT:
        raise ValueError(f"{path} holds no states that Snapshot.save has written")
    if header["version"] != _VERSION:
        raise ValueError(f"{path} has version {header['version']} of the format, and this deltazoo reads {_VERSION}")
    differing = [name for name, digest in _identity(model).items() if header.get(name) != digest]
    if differing:
        raise ValueError(f"{path} has states of another model: {' and '.join(differing)} differ")


def snapshot(cache: Cache, rows: Sequence[int] | Tensor | None = None, *, num_tokens: int | None = None) -> Snapshot:
    """An immutable copy of all that a cache holds, on its device.

    Args:
        cache: of any model with delta-rule layers, used or not.
        rows: of the batch, in this order; None: all.
        num_tokens: how many tokens these rows have, where the batch counts more because of padding on the left; softmax
            layers give the keys and values of that many last ones. None: as many as the cache has seen.

    Raises:
        ValueError: a layer of an unknown kind, no such row, more tokens than the cache has.
    """
    kinds = tuple(map(kind_of, cache.layers))
    counts = [tokens_of(layer) for layer, kind in zip(cache.layers, kinds, strict=True) if kind != "linear"]
    seen = max(counts, default=0)
    if num_tokens is None:
        num_tokens = seen
    if not isinstance(num_tokens, int) or num_tokens < 0 or (counts and num_tokens > seen):
        raise ValueError(
            f"num_tokens must be a whole number between 0 and the {seen} tokens of the cache, got {num_tokens}"
        )
    of_tokens = tuple(_of_tokens(tensors_of(layer), num_tokens) for layer in cache.layers)
    whole = Snapshot(kinds, of_tokens, num_tokens)
    return whole.with_tensors(torch.clone) if rows is None else whole.select(rows)


def _of_tokens(tensors: Tensors, count: int) -> Tensors:
    if "keys" not in tensors:
        return tensors
    before = max(0, tensors["keys"].shape[2] - count)
    return {name: x[:, :, before:] for name, x in tensors.items()}


def restore(cache: Cache, saved: Snapshot, rows: Sequence[int] | Tensor | None = None) -> None:
    """Put states into a cache, in place. What the cache held, or what those rows held, is gone.

    The cache gets copies on its own device (a fresh one on that of the snapshot), in tensors at the same addresses if
    it is a `StaticCache`. Nothing is changed if an error is raised.

    Args:
        cache: of the same model: the one the states came from, or another, used or fresh.
        saved: from `snapshot` or `Snapshot.load`.
        rows: of the cache that the snapshot's rows become, in this order; None: the snapshot becomes the whole batch.

    Raises:
        ValueError: other layers, shapes or dtypes than the cache has; rows that do not fit. A static cache keeps its
            number of rows.
    """
    _make_ready(cache, saved)
    index = None
    if rows is not None:
        present = [n for n in (num_rows_of(tensors_of(layer)) for layer in cache.layers) if n is not None]
        index = _row_numbers(rows, min(present, default=0))
        if len(index) != saved.num_rows or len(index.unique()) != len(index):
            raise ValueError(f"{saved.num_rows} rows need as many different places, got rows={index.tolist()}")
    for number, (layer, kind, tensors) in enumerate(zip(cache.layers, saved.kinds, saved.layers, strict=True)):
        reason = why_not_fill(layer, kind, tensors, saved.num_tokens, rows_only=index is not None)
        if reason is not None:
            raise ValueError(f"the states do not fit layer {number} of the cache: {reason}")
    moved = [_to_device_of(layer, tensors) for layer, tensors in zip(cache.layers, saved.layers, strict=True)]
    if index is None:
        cache.reset()
        for layer, tensors in zip(cache.layers, moved, strict=True):
            fill(layer, tensors, saved.num_tokens, cache.layers)
        return
    index_on = cached(index.to)
    for layer, tensors in zip(cache.layers, moved, strict=True):
        if tensors:
            fill_rows(layer, tensors, index_on(next(iter(tensors.values())).device))


def _to_device_of(layer: Any, tensors: Tensors) -> Tensors:
    """The tensors on the device of what a cache layer holds; where they are, if it holds nothing."""
    held = next(iter(tensors_of(layer).values()), None)
    return tensors if held is None else {name: x.to(held.device) for name, x in tensors.items()}


def _make_ready(cache: Cache, saved: Snapshot) -> None:
    """Give a fresh cache the layers that the snapshot is of; ValueError if it has others."""
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


def fork(cache: Cache, n: int) -> None:
    """Make every row n rows, copies side by side, in place; a static cache cannot, restore a fork in another."""
    restore(cache, snapshot(cache).fork(n))


def detach(cache: Cache) -> Cache:
    """The cache, through which no gradient flows to the tokens so far any more.

    For truncated backpropagation through time: a pass over further tokens starts from the same states, and its
    `backward()` stops there. The cache is changed in place, and nothing is copied.

    Args:
        cache: of any model with delta-rule layers, used or not.

    Raises:
        ValueError: a layer of an unknown kind.
    """
    for layer in cache.layers:
        detach_contents(layer)
    return cache


class RowStates:
    """Single rows of a static cache as snapshots, with one launch per dtype for the states of all layers.

    Args:
        cache: filled, so that its tensors stay where they are. Its softmax layers, if any, are `RowKeyValues`: the keys
            of a row begin at column 0.

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
                groups.setdefault((x.dtype, x.device, name in _PER_TOKEN), []).append((number, name))
        self._groups = [*groups.values()]
        rows = min(len(x) for tensors in held for x in tensors.values())
        # Made once: one view takes as long as a launch, and there are two for each layer.
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
        """Replace a row by one that `take` gave, for this cache or another of the model; None: by an empty one."""
        for group, rows in zip(self._groups, self._views, strict=True):
            if state is None or group[0][1] in _PER_TOKEN:  # keys after the row's end are hidden, and must not be NaN
                torch._foreach_zero_(rows[row])
            if state is not None:
                new = [state.layers[number][name] for number, name in group]
                torch._foreach_copy_(_first_tokens(group, rows[row], state.num_tokens), new)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Replace rows by others; none is both a source and a target."""
        if sources:
            for rows in self._views:
                torch._foreach_copy_(
                    [x for row in targets for x in rows[row]], [x for row in sources for x in rows[row]]
                )


def _first_tokens(group: Sequence[tuple[int, str]], views: list[Tensor], count: int) -> list[Tensor]:
    """Views of tensors of one kind, of keys and values without what comes after so many tokens."""
    return [x[:, :, :count] for x in views] if group[0][1] in _PER_TOKEN else views


def _row_numbers(rows: Sequence[int] | Tensor, count: int) -> Tensor:
    """Rows as int64 `[M]` on the CPU; ValueError unless all are among `count`."""
    given = torch.as_tensor(rows, device="cpu")
    if given.numel() and (given.dtype == torch.bool or given.is_floating_point()):  # an empty list is one of floats
        raise ValueError(
            f"rows must be a list of numbers from 0 to {count - 1}, got {given.dtype} values: of a mask "
            "mask.nonzero().flatten() gives them"
        )
    index = given.long()
    if index.ndim != 1 or not bool(((index >= 0) & (index < count)).all()):
        raise ValueError(f"rows must be a list of numbers from 0 to {count - 1}, got {index.tolist()}")
    return index


def _identity(model: PreTrainedModel) -> dict[str, str]:
    """Digests of what a state depends on: configuration, rules and weights, as they are now.

    All numbers of all weights count, buffers in the state dict included. They are rounded to bfloat16, so that a
    float32 model and its bfloat16 copy are the same.
    """
    config: Any = model.config
    keys = {key: value for key, value in config.to_diff_dict().items() if key.lstrip("_") not in _NOT_OF_THE_MODEL}
    rules = [
        [name, layer.extra_repr(), {key: choice_name(value) for key, value in vars(layer.spec).items()}]
        for name, layer in model.named_modules()
        if isinstance(layer, DeltaRuleAttention)
    ]
    weights = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    away = next((name for name, x in weights.items() if x.is_meta), None)
    if away is not None:
        raise ValueError(f"{away} is not in memory, so the model cannot be told from others: load all weights")
    different = {id(x): x for x in weights.values()}  # tied weights have several names
    with ThreadPoolExecutor() as pool:  # hashing large buffers runs without Python's lock
        digests = dict(zip(different, pool.map(_weight_digest, different.values()), strict=True))
    described = {name: [list(x.shape), digests[id(x)]] for name, x in weights.items()}
    return {"configuration": _digest(keys), "rules": _digest(rules), "weights": _digest(described)}


def _weight_digest(weight: Tensor) -> str:
    digest = sha256()
    for piece in weight.detach().flatten().split(_PIECE):
        rounded = piece.to(torch.bfloat16) if piece.is_floating_point() else piece
        digest.update(rounded.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _digest(x: object) -> str:
    return sha256(json.dumps(x, sort_keys=True, default=str).encode()).hexdigest()[:16]
