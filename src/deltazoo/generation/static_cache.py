"""Static caches that a captured step can work on: every tensor stays at its address from one step to the next."""

from collections.abc import Iterator
from copy import copy
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from deltazoo.generation.cache import DeltaRuleCacheLayer
from deltazoo.generation.layer_contents import fill, tensors_of, tokens_of

__all__ = [
    "FixedTensors",
    "bytes_when_fixed",
    "check_fixed",
    "describe_layer",
    "fixed_cache",
    "move_cache",
    "some_rows",
]


def fixed_cache(model: Any, max_length: int) -> StaticCache:
    """An empty static cache of a model that a captured step can work on.

    Args:
        model: a causal language model of transformers.
        max_length: tokens that softmax layers can hold.

    Raises:
        ValueError: a layer keeps its past in a way that a graph cannot replay.
    """
    cache = StaticCache(config=model.config, max_cache_len=max_length)
    for index, layer in enumerate(cache.layers):
        # Windows are counted on the host, which a replay does not do. With all keys kept, masks select the window.
        if type(layer) is StaticSlidingWindowLayer:
            cache.layers[index] = StaticLayer(max_cache_len=max_length)
    prepare = getattr(model, "prepare_cache", None)
    if prepare is not None:
        prepare(cache)
    check_fixed(cache)
    return cache


def check_fixed(cache: Cache) -> None:
    """ValueError unless a captured step can work on all layers of a static cache."""
    for layer in cache.layers:
        if type(layer) not in (StaticLayer, LinearAttentionLayer, DeltaRuleCacheLayer):
            raise ValueError(
                f"a captured step cannot work on a cache with a {describe_layer(layer)}; the ordinary generate can"
            )


def describe_layer(layer: Any) -> str:
    """The class of a cache layer on which no captured step can work, and why if we know."""
    name = type(layer).__name__
    if isinstance(layer, DynamicIndexedLayer | StaticIndexedLayer):
        # Qwen4-Exp: visible tokens by `nonzero`, row by row. GLM-5-Next: as many pools as have a visible token.
        return f"{name} (sparse softmax attention counts on the host the tokens that it chooses among)"
    return name


def bytes_when_fixed(cache: Cache, max_length: int) -> int:
    """Memory of the keys and values of a filled dynamic cache if it held `max_length` tokens."""
    softmax: list[Any] = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    tensors: list[Tensor] = [x for layer in softmax for x in (layer.keys, layer.values)]
    return sum(x.nbytes // x.shape[2] * max_length for x in tensors)


def move_cache(source: Cache, target: StaticCache) -> None:
    """Move the contents of a dynamic cache to an empty static one, layer by layer; the dynamic cache is empty then."""
    source.layers, layers = [], source.layers
    layers.reverse()
    for new in target.layers:
        old = layers.pop()  # its memory is free before the next layer is moved
        fill(new, tensors_of(old), tokens_of(old), target.layers)


def some_rows(cache: StaticCache, rows: slice) -> StaticCache:
    """A cache whose tensors are some rows of a filled one's: a step over it changes those rows alone."""
    narrow = copy(cache)
    narrow.layers = []
    for layer in cache.layers:
        part = copy(layer)
        for name, value in vars(part).items():
            if isinstance(value, dict):
                setattr(part, name, dict(value))
        for owner, name, x in _tensors_of(part):
            if x.ndim:  # the others are counts
                owner[name] = x[rows]
        narrow.layers.append(part)
    return narrow


class FixedTensors:
    """The tensors of a filled static cache, at the addresses that a captured step uses.

    Args:
        cache: of `fixed_cache`, after its first tokens.
    """

    def __init__(self, cache: Cache) -> None:
        self._owned = [owned for layer in cache.layers for owned in _tensors_of(layer)]

    @property
    def changed(self) -> list[Tensor]:
        """What a step changes and reads again. Its keys and values are left out: repeated, it writes the same ones."""
        return [tensor for _, name, tensor in self._owned if name not in ("keys", "values")]

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        return sum(tensor.nbytes for _, _, tensor in self._owned)

    def put_back(self) -> None:
        """Copy tensors back to their addresses; transformers' key/value layers make new ones when beams change rows."""
        for owner, name, tensor in self._owned:
            if owner[name] is not tensor:
                tensor.copy_(owner[name])
                owner[name] = tensor


def _tensors_of(layer: Any) -> Iterator[tuple[dict[Any, Any], Any, Tensor]]:
    """The tensors of a cache layer (attributes, and dicts of states), each with the dict and the name that hold it."""
    for owner in (vars(layer), *(x for x in vars(layer).values() if isinstance(x, dict))):
        yield from [(owner, name, x) for name, x in owner.items() if isinstance(x, Tensor)]
