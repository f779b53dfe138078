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

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, StaticLayer

from deltazoo.generation.cache import DeltaRuleCacheLayer, RowKeyValues, prepare_cache_layer
from deltazoo.generation.static_cache import held_tensors
from deltazoo.layers import DeltaRuleAttention
from deltazoo.layers.state import LayerState
from deltazoo.spec import choice_name

Tensors = Mapping[str, Tensor]
"""Tensors of one layer by name, rows of the batch first; empty before its first token. "conv", "recurrent" and
"auxiliary" are those of `LayerState`; "keys" and "values" `[N, H, L, D]` are those of the last L tokens."""
PER_TOKEN = ("keys", "values")
_FORMAT = "deltazoo states"
_VERSION = "2"
_NOT_OF_THE_MODEL = {"architectures", "dtype", "name_or_path", "torch_dtype", "transformers_version", "use_cache"}
"""Keys of a configuration that differ between copies of one model."""
_PIECE = 2**22
"""Numbers of a weight that are rounded and hashed at once."""
_KINDS: Mapping[type[Any], str] = {
    DeltaRuleCacheLayer: "delta_rule",
    LinearAttentionLayer: "linear",
    DynamicLayer: "softmax",
    DynamicSlidingWindowLayer: "softmax",
    StaticLayer: "softmax",
    RowKeyValues: "softmax",
}
"""Kinds of cache layers by their exact class, since a subclass may hold more: ours; transformers' layer with a
convolution window and a recurrent state, which accelerated models keep; keys and values, growing or static."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The states of all layers of a cache after some tokens. Nothing changes them: methods make new snapshots."""

    kinds: tuple[str, ...]
    """Kind of each layer: "delta_rule", "linear" (a layer of transformers with window and state) or "softmax"."""
    layers: tuple[Tensors, ...]
    """Tensors of each layer by name, rows first; empty for a layer that holds nothing."""
    num_tokens: int
    """Number of tokens that the states have seen, padding included."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch; 0 before the first token."""
        return next((len(x) for tensors in self.layers for x in tensors.values()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for tensors in self.layers for x in tensors.values())

    @property
    def device(self) -> torch.device | None:
        """Device of the first tensor; None before the first token."""
        return next((x.device for tensors in self.layers for x in tensors.values()), None)

    def select(self, rows: Sequence[int] | Tensor) -> "Snapshot":
        """A snapshot of the given rows, in that order, which may repeat; ValueError if there is no such row."""
        index = row_numbers(rows, self.num_rows)
        return self.with_tensors(lambda x: x.index_select(0, index.to(x.device)))

    def fork(self, n: int) -> "Snapshot":
        """A snapshot of every row n times, copies side by side, for beams and parallel samples."""
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        return self.select(torch.arange(self.num_rows).repeat_interleave(n))

    def padded(self, num_tokens: int) -> "Snapshot":
        """A snapshot with zeros before the keys and values of softmax layers, so that they hold `num_tokens` tokens.

        Masks must hide the new tokens, as they hide padding on the left. Linear layers stay as they are.

        Raises:
            ValueError: there are more tokens already, or a softmax layer holds a window of them.
        """
        missing = num_tokens - self.num_tokens
        lengths = {tensors["keys"].shape[2] for tensors in self.layers if "keys" in tensors}
        if missing < 0 or lengths - {self.num_tokens}:
            raise ValueError(f"{self.num_tokens} tokens, of which layers hold {lengths}, cannot become {num_tokens}")
        layers = tuple(
            {name: F.pad(x, (0, 0, missing, 0)) if name in PER_TOKEN else x for name, x in tensors.items()}
            for tensors in self.layers
        )
        return replace(self, layers=layers, num_tokens=num_tokens)

    def to(self, device: torch.device | str) -> "Snapshot":
        """The snapshot on another device, for instance "cpu" for states that are not needed now."""
        return self.with_tensors(lambda x: x.to(device))

    def with_tensors(self, function: Callable[[Tensor], Tensor]) -> "Snapshot":
        """A snapshot with the results of a function of each tensor."""
        layers = tuple({name: function(x) for name, x in tensors.items()} for tensors in self.layers)
        return replace(self, layers=layers)

    def save(self, path: str | PathLike[str], model: PreTrainedModel) -> None:
        """Write a safetensors file that `load` accepts for this model alone. All weights are read, to identify it.

        Args:
            path: path of the file.
            model: the model of the states.

        Raises:
            ValueError: the model's weights are not in memory.
        """
        tensors = {
            f"{index}.{name}": x.contiguous() for index, layer in enumerate(self.layers) for name, x in layer.items()
        }
        header = {"format": _FORMAT, "version": _VERSION, "num_tokens": str(self.num_tokens)}
        draft = Path(f"{path}.part")  # a process that is killed leaves no half file
        try:
            save_file(tensors, draft, header | {"kinds": json.dumps(self.kinds)} | _identity(model))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | PathLike[str], model: PreTrainedModel, device: torch.device | str = "cpu") -> "Snapshot":
        """The snapshot of a file that `save` has written. All weights of the model are read, to compare it.

        Args:
            path: path of the file.
            model: the model that will continue from the states.
            device: device of the tensors.

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
    counts = [_tokens_of(layer) for layer in cache.layers if kind_of(layer) != "linear"]
    seen = max(counts, default=0)
    if num_tokens is None:
        num_tokens = seen
    if not isinstance(num_tokens, int) or num_tokens < 0 or (counts and num_tokens > seen):
        raise ValueError(
            f"num_tokens must be a whole number between 0 and the {seen} tokens of the cache, got {num_tokens}"
        )
    layers: list[Tensors] = [tensors_of(layer) for layer in cache.layers]
    for index, tensors in enumerate(layers):
        if "keys" in tensors and tensors["keys"].shape[2] > num_tokens:
            layers[index] = {name: x[:, :, x.shape[2] - num_tokens :] for name, x in tensors.items()}
    return Snapshot(tuple(map(kind_of, cache.layers)), tuple(layers), num_tokens)


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
    if kind_of(layer) != kind:
        return f"a {kind} layer's contents do not fit a {type(layer).__name__}"
    held = tensors_of(layer)
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
    kind = kind_of(layer)
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
    for new in target.layers:
        old = layers.pop(0)  # frees its memory before the next layer moves
        _fill(new, tensors_of(old), _tokens_of(old), target.layers)


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
        kind_of(layer)  # another kind may keep tensors elsewhere
        for owner, name, x in held_tensors(layer):
            if x.requires_grad:
                owner[name] = x.detach()
    return cache


def kind_of(layer: Any) -> str:
    """The kind of a cache layer; ValueError for one that is not known here."""
    kind = _KINDS.get(type(layer))
    if kind is None or getattr(layer, "number_of_states", 1) != 1:
        known = ", ".join(cls.__name__ for cls in _KINDS)
        raise ValueError(f"the contents of a {type(layer).__name__} cannot be taken out of a cache; known: {known}")
    return kind


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """The tensors of a layer, not copied."""
    kind = kind_of(layer)
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
    return 0 if kind_of(layer) == "linear" else int(layer.get_seq_length())


def row_numbers(rows: Sequence[int] | Tensor, count: int) -> Tensor:
    """Rows as int64 `[M]` on the CPU; ValueError unless all are below `count`."""
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


def _check_header(header: dict[str, str], model: PreTrainedModel, path: object) -> None:
    if header.get("format") != _FORMAT:
        raise ValueError(f"{path} holds no states that Snapshot.save has written")
    if header["version"] != _VERSION:
        raise ValueError(f"{path} has version {header['version']} of the format, and this deltazoo reads {_VERSION}")
    differing = [name for name, digest in _identity(model).items() if header.get(name) != digest]
    if differing:
        raise ValueError(f"{path} has states of another model: {' and '.join(differing)} differ")


def _identity(model: PreTrainedModel) -> dict[str, str]:
    """Digests of configuration, rules and weights, on which a state depends, at present.

    All numbers of all weights count, buffers in the state dict included. They are rounded to bfloat16, so that a
    float32 model and its bfloat16 copy have equal digests.
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
    different = {id(x): x for x in weights.values()}  # one entry per tensor, since tied weights have several names
    digests = {key: _weight_digest(x) for key, x in different.items()}
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
