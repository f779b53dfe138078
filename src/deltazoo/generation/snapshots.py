"""A snapshot: the contents of all layers of a cache after some tokens, as a value that can be saved in a file."""

import json
from collections.abc import Callable, Mapping, Sequence
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

from deltazoo.layers import DeltaRuleAttention
from deltazoo.spec import choice_name

__all__ = ["PER_TOKEN", "Snapshot", "Tensors", "row_numbers"]

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


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The states of all layers of a cache after some tokens. Nothing changes them: methods make new snapshots."""

    kinds: tuple[str, ...]
    """Kind of each layer: "delta_rule", "linear" or "softmax", see `deltazoo.generation.states.KINDS`."""
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
        index_on = cached(row_numbers(rows, self.num_rows).to)
        return self.with_tensors(lambda x: x.index_select(0, index_on(x.device)))

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
        save_file(tensors, draft, header | {"kinds": json.dumps(self.kinds)} | _identity(model))
        draft.replace(path)

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


def _check_header(header: dict[str, str], model: PreTrainedModel, path: object) -> None:
    if header.get("format") != _FORMAT:
        raise ValueError(f"{path} holds no states that Snapshot.save has written")
    if header["version"] != _VERSION:
        raise ValueError(f"{path} has version {header['version']} of the format, and this deltazoo reads {_VERSION}")
    differing = [name for name, digest in _identity(model).items() if header.get(name) != digest]
    if differing:
        raise ValueError(f"{path} has states of another model: {' and '.join(differing)} differ")


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
