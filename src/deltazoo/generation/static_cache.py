"""Static caches that a captured step can work on: every tensor stays at its address from one step to the next."""

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
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

from deltazoo.generation.cache import DeltaRuleCacheLayer, RowKeyValues

IMPLEMENTATIONS = ("sdpa", "eager")
"""Implementations of softmax attention in a step; others read masks that grow, or that are no tensors."""


def fixed_cache(model: Any, max_length: int | None, position: Tensor | None = None) -> StaticCache:
    """An empty static cache of a model that a captured step can work on.

    Args:
        model: a causal language model of transformers.
        max_length: number of tokens that softmax layers can hold; None: the model has none.
        position: `[N, 1]` int64, gives rows their own lengths, see `RowKeyValues`; None: rows end at the same place.

    Raises:
        ValueError: a layer keeps its past in a way that a graph cannot replay, or that rows of their own lengths cannot
            share; `max_length` is missing.
    """
    cache = StaticCache(config=model.config, max_cache_len=max_length or 1)
    for index, layer in enumerate(cache.layers):
        # The host counts the tokens of windows, which a replay does not repeat. With all keys kept, masks select the
        # window.
        if type(layer) is StaticSlidingWindowLayer:
            if position is not None:
                raise ValueError("rows of different lengths share no cache of softmax layers with sliding windows")
            cache.layers[index] = StaticLayer(max_cache_len=max_length or 1)
    prepare = getattr(model, "prepare_cache", None)
    if prepare is not None:
        prepare(cache)
    reason = why_not_fixed(cache)
    if reason is not None:
        raise ValueError(reason)
    if position is None:
        return cache
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
        elif isinstance(layer, DeltaRuleCacheLayer) and max_length is not None:
            # Older versions of transformers ask the first layer for a count.
            layer.fix_count(torch.tensor(max_length, device=position.device))
    return cache


def why_not_fixed(cache: Cache) -> str | None:
    """The reason why a captured step cannot work on all layers of a static cache; None if it can."""
    for layer in cache.layers:
        if type(layer) not in (StaticLayer, LinearAttentionLayer, DeltaRuleCacheLayer):
            return f"a captured step cannot work on a cache with a {describe_layer(layer)}; the ordinary generate can"
    return None


def describe_layer(layer: Any) -> str:
    """The class of a cache layer on which no captured step can work, and the reason if it is known."""
    name = type(layer).__name__
    if isinstance(layer, DynamicIndexedLayer | StaticIndexedLayer):
        # Qwen4-Exp: visible tokens by `nonzero`, row by row. GLM-5-Next: as many pools as have a visible token.
        return f"{name} (sparse softmax attention counts on the host the tokens that it chooses among)"
    return name


def bytes_when_fixed(cache: Cache, max_length: int) -> int:
    """Bytes of the keys and values of a filled dynamic cache if it held `max_length` tokens."""
    softmax: list[Any] = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    tensors: list[Tensor] = [x for layer in softmax for x in (layer.keys, layer.values)]
    return sum(x.nbytes // x.shape[2] * max_length for x in tensors)


def some_rows(cache: StaticCache, rows: slice) -> StaticCache:
    """A cache whose tensors are some rows of a filled one's: a step over it changes those rows alone."""
    narrow = copy(cache)
    narrow.layers = []
    for layer in cache.layers:
        part = copy(layer)
        for name, value in vars(part).items():
            if isinstance(value, dict):
                setattr(part, name, dict(value))
        for owner, name, x in held_tensors(part):
            if x.ndim:  # counts have no dimension
                owner[name] = x[rows]
        narrow.layers.append(part)
    return narrow


class FixedTensors:
    """The tensors of a filled static cache, at the addresses that a captured step uses.

    Args:
        cache: a result of `fixed_cache`, after its first tokens.
    """

    def __init__(self, cache: Cache) -> None:
        self._owned = [owned for layer in cache.layers for owned in held_tensors(layer)]

    @property
    def changed(self) -> list[Tensor]:
        """The tensors that a step changes and reads again; not keys and values, which a repeated step writes again."""
        return [tensor for _, name, tensor in self._owned if name not in ("keys", "values")]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for _, _, tensor in self._owned)

    def put_back(self) -> None:
        """Copy tensors back to their addresses; transformers' key/value layers make new ones when beams change rows."""
        for owner, name, tensor in self._owned:
            if owner[name] is not tensor:
                tensor.copy_(owner[name])
                owner[name] = tensor


def held_tensors(layer: Any) -> Iterator[tuple[dict[Any, Any], Any, Tensor]]:
    """The tensors of a cache layer (attributes, and dicts of states), each with the dict and the name that hold it."""
    for owner in (vars(layer), *(x for x in vars(layer).values() if isinstance(x, dict))):
        yield from [(owner, name, x) for name, x in owner.items() if isinstance(x, Tensor)]
