"""Layers of transformers' caches that hold states of delta-rule layers, and the name by which models take a cache.

A model puts one `DeltaRuleCacheLayer` per linear layer into the plain `DynamicCache` or `StaticCache` that `generate`
or the user made. transformers' own linear-attention cache layer does not suffice: it counts no tokens, so a cache of
such layers alone has no length, and it loses the state of layers without a convolution.

transformers passes a cache as `cache` since 5.24, before as `past_key_values` and `cache_params`. This file alone of
the package knows which version uses which name.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg

from deltazoo.layers.state import LayerState

CACHE = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"
"""Name of the cache among the arguments of models and of transformers' functions, and in their outputs."""
_OLD_NAME = "past_key_values"
_NO_LONGER_TAKEN = "5.40.0"
"""The version of transformers that no longer takes the old name."""


class DeltaRuleCacheLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """Convolution window, float32 state and token count of one delta-rule layer; its size does not grow.

    The layer continues from `state` alone. To move a cache or to restore a saved state, `reset` and then `store`
    replace it.

    Args:
        static: whether new states are written into the tensors of the first call, so that addresses never change, and
            tokens are counted on the device. Compiled code and CUDA graphs rely on both in a `StaticCache`.
        mask_length: the number of keys for which the cache's softmax layers make masks, if it is fixed.
    """

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, static: bool = False, mask_length: int | None = None) -> None:
        CacheLayerMixin.__init__(self)
        LinearAttentionCacheLayerMixin.__init__(self)
        self.static = static
        self.mask_length = mask_length
        self.auxiliary_state: Tensor | None = None
        self.num_tokens: int | Tensor = 0
        self._counts = True

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether compiled code may use the layer at every step without a new trace."""
        return self.static

    @property
    def batch_size(self) -> int:
        """Rows of the state; AttributeError before the first token, as in other cache layers."""
        if self.recurrent_states[0] is None:
            raise AttributeError("batch_size")
        return self.recurrent_states[0].shape[0]

    @property
    def state(self) -> LayerState | None:
        """Window and state from which the layer continues; None before its first token."""
        if not self.has_previous_state[0]:
            return None
        return LayerState(self.conv_states[0], self.recurrent_states[0], self.auxiliary_state)  # type: ignore[arg-type]

    def store(self, state: LayerState, num_new_tokens: int, others: Iterable[Any] = ()) -> None:
        """Keep the state after `num_new_tokens` more tokens.

        Args:
            state: the layer's state.
            num_new_tokens: tokens since the last call.
            others: layers of the same static cache. All see the same tokens, so the first that is filled counts for
                all. The layer keeps no reference to them, since exporting a cache follows every reference.
        """
        if self.static:
            self._overwrite(state)
            self._count_on_device(num_new_tokens, state.recurrent.device, others)
        else:
            self._keep(state)
            self.num_tokens += num_new_tokens

    def _overwrite(self, state: LayerState) -> None:
        held = self.conv_states[0], self.recurrent_states[0], self.auxiliary_state
        if self.recurrent_states[0] is None:
            return self._keep(LayerState(*map(_at_fixed_address, state)))
        for ours, new in zip(held, state, strict=True):
            if ours is not None and new is not ours:  # a step may have written the state in place
                ours.copy_(new)  # type: ignore[arg-type]
        self.has_previous_state[0] = True

    def _keep(self, state: LayerState) -> None:
        self.conv_states[0], self.recurrent_states[0], self.auxiliary_state = state
        self.is_conv_states_initialized[0] = state.conv is not None
        self.is_recurrent_states_initialized[0] = True
        self.has_previous_state[0] = True
        self.device, self.dtype = state.recurrent.device, state.recurrent.dtype  # type: ignore[assignment]
        self.is_initialized = True

    def _count_on_device(self, num_new_tokens: int, device: torch.device, others: Iterable[Any]) -> None:
        if isinstance(self.num_tokens, int):
            counts = (layer.num_tokens for layer in others if isinstance(layer, DeltaRuleCacheLayer))
            shared = next((count for count in counts if isinstance(count, Tensor)), None)
            self._counts = shared is None
            self.num_tokens = _at_fixed_address(torch.tensor(0, device=device)) if shared is None else shared
        if self._counts:
            self.num_tokens.add_(num_new_tokens)

    def fix_count(self, num_tokens: Tensor) -> None:
        """Stop counting, and report this number from now on."""
        self.num_tokens, self._counts = num_tokens, False

    # Lengths and masks, which transformers asks for.

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]
        """Tokens seen so far, padding included."""
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys in the cache's softmax layers; older versions ask the cache's first layer."""
        return self.mask_length or self.num_tokens + query_length, 0  # type: ignore[return-value]

    def get_max_length(self) -> int:
        """No maximum (-1): the state has no time axis."""
        return -1

    # Rows, for beam search and changes of the batch.

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes the former row `beam_idx[i]`."""
        if self.state is None:
            return
        taken = self.state.rows(beam_idx.to(self.device))
        if self.static and len(beam_idx) == self.batch_size:
            self._overwrite(taken)
        else:
            self._keep(taken)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies side by side."""
        if self.has_previous_state[0]:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget all tokens; a static layer keeps its tensors."""
        self.has_previous_state[0] = False
        if self.static:
            count = self.num_tokens if self._counts else None
            for x in (self.conv_states[0], self.recurrent_states[0], self.auxiliary_state, count):
                if isinstance(x, Tensor):
                    x.zero_()
            return
        self.conv_states[0] = self.recurrent_states[0] = self.auxiliary_state = None
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = False
        self.is_initialized = False
        self.num_tokens = 0

    def crop(self, *tokens_to_remove: int) -> None:
        """Refuse to remove tokens, or to record them: a recurrence with decay cannot be run backwards."""
        refuse_to_go_back()

    activate_past_recording = crop

    # The rest of transformers' interface, which code calls that writes linear-attention states itself.

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the first `store` provides the tensors."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse keys and values: the layer is linear."""
        raise ValueError("this cache layer belongs to a delta-rule layer and holds no keys and values")

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse a state without its window: `store` keeps both."""
        raise NotImplementedError("a delta-rule cache layer takes its states through store()")

    update_conv_state = update_recurrent_state


class RowKeyValues(StaticLayer):
    """A static layer that writes each row's new keys at that row's own position.

    The key of position p is in column p in every row. Columns at and after a row's end hold arbitrary numbers:
    the caller's mask must hide them. transformers makes masks for queries behind the last column, so that causality
    hides nothing more.

    Args:
        max_cache_len: number of columns.
        position: `[N, 1]` int64, position of the next token of each row; it stays at its address. All new tokens must
            be below `max_cache_len`.
    """

    def __init__(self, max_cache_len: int, position: Tensor) -> None:
        super().__init__(max_cache_len)
        self.position = position

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All columns, after writing the new tokens, as many in every row."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        columns, num_tokens = self.position, key_states.shape[2]
        if num_tokens != 1:
            columns = columns + torch.arange(num_tokens, device=columns.device)
        columns = columns[:, None, :, None]
        self.keys.scatter_(2, columns.expand_as(key_states), key_states)
        self.values.scatter_(2, columns.expand_as(value_states), value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Number of all columns."""
        return self.max_cache_len


class CacheStates:
    """A transformers cache as the `past_key_values` that `deltazoo.layers` expect.

    Args:
        cache: a cache that `prepare_cache` has prepared.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.fixed = isinstance(cache, StaticCache)

    def get_state(self, layer_idx: int) -> LayerState | None:
        """The layer's state, or None before its first token."""
        return self.cache.layers[layer_idx].state  # type: ignore[union-attr]

    def set_state(self, layer_idx: int, state: LayerState, num_new_tokens: int) -> None:
        """Keep the layer's state after `num_new_tokens` further tokens."""
        self.cache.layers[layer_idx].store(state, num_new_tokens, self.cache.layers)  # type: ignore[union-attr]


def _at_fixed_address(x: Any) -> Any:
    """A copy whose address compiled code and CUDA graphs may rely on; None stays None."""
    if x is None:
        return None
    x = x.clone()
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(x)
    return x


def refuse_to_go_back() -> NoReturn:
    """Raise RuntimeError, since a cache of states cannot take tokens back."""
    raise RuntimeError(
        "the state of a delta-rule layer cannot take tokens back, so its cache neither records tokens nor crops them: "
        "take a deltazoo.generation.snapshot of the cache before those tokens, and restore it"
    )


def is_used(layer: Any) -> bool:
    """Whether a cache layer of any kind holds keys and values, or states."""
    return getattr(layer, "is_initialized", False) or any(getattr(layer, "has_previous_state", {}).values())


def why_not_shared(cache: Cache | None) -> str | None:
    """The reason why rows that several ranks share cannot fill a cache; None if they can, or there is none."""
    if cache is None:
        return None
    if not isinstance(cache, DynamicCache):
        return f"rows that several ranks share fill a DynamicCache, got a {type(cache).__name__}"
    if any(is_used(layer) for layer in cache.layers):
        return (
            "rows that several ranks share fill an empty cache; for the tokens after them call "
            "deltazoo.context_parallel(model, None)"
        )
    return None


def layer_of_cache(cache: Cache, index: int) -> Any:
    """Layer number `index` of a cache; ValueError if the cache has fewer layers."""
    if index >= len(cache.layers):
        raise ValueError(
            f"the cache has {len(cache.layers)} layers and the model more: it belongs to another model, or was not "
            "made with DynamicCache(config=model.config)"
        )
    return cache.layers[index]


def not_of_a_linear_layer(layer: Any, index: int) -> ValueError:
    """The error for a cache that holds no state at the place of the model's linear layer `index`."""
    return ValueError(
        f"layer {index} of the model is linear, but the cache holds a used {type(layer).__name__} there: it belongs to "
        "another model, or is a prefix of keys and values (prefix tuning), which only softmax layers can attend to"
    )


def check_cache(cache: object, num_layers: int) -> None:
    """Raise ValueError for anything but a cache of transformers that holds tokens in at most `num_layers` layers."""
    if not isinstance(cache, Cache):
        raise ValueError(f"the cache must be a transformers Cache, got {type(cache).__name__}")
    if any(is_used(layer) for layer in cache.layers[num_layers:]):
        raise ValueError(
            f"the cache has {len(cache.layers)} layers and the model {num_layers}: it belongs to another model"
        )


def prepare_cache(cache: Cache, layer_types: Sequence[str]) -> None:
    """Put a `DeltaRuleCacheLayer` into a fresh cache for every linear layer, in place; prepared ones stay.

    Args:
        cache: a `DynamicCache` (with or without config) or a `StaticCache`.
        layer_types: types of the layers that run.

    Raises:
        ValueError: the cache has other layers than the model, and has been used.
    """
    check_cache(cache, len(layer_types))
    if not cache.layers and cache.layer_class_to_replicate is not None:
        cache.layers.extend(cache.layer_class_to_replicate() for _ in layer_types)
    del cache.layers[len(layer_types) :]  # transformers 5.14 makes a layer per entry of config.layer_types
    if len(cache.layers) != len(layer_types):
        raise ValueError(
            f"the cache has {len(cache.layers)} layers and the model {len(layer_types)}: it belongs to another model"
        )
    for index, layer_type in enumerate(layer_types):
        layer = cache.layers[index]
        if layer_type == "linear_attention":
            prepare_cache_layer(cache, index)
        elif not isinstance(layer, DynamicLayer | StaticLayer):
            raise ValueError(
                f"layer {index} of the model is a softmax layer, but the cache holds a {type(layer).__name__} there: "
                "it belongs to another model"
            )


def prepare_cache_layer(cache: Cache, index: int) -> None:
    """Put a `DeltaRuleCacheLayer` into a fresh cache as layer `index`, in place; one that is already there stays.

    Raises:
        ValueError: the cache has no such layer, or holds keys and values there.
        RuntimeError: the layer records tokens, to take them back.
    """
    if cache.layer_class_to_replicate is not None:
        cache.layers.extend(cache.layer_class_to_replicate() for _ in range(index + 1 - len(cache.layers)))
    layer = layer_of_cache(cache, index)
    if isinstance(layer, DeltaRuleCacheLayer):
        return
    if is_used(layer):
        raise not_of_a_linear_layer(layer, index)
    if getattr(layer, "record_past", False):
        refuse_to_go_back()
    # The masks of full softmax layers are longer than the windows of sliding layers.
    lengths = [other.max_cache_len for other in cache.layers if isinstance(other, StaticLayer)]
    cache.layers[index] = DeltaRuleCacheLayer(isinstance(cache, StaticCache), max(lengths, default=None))


def takes_cache(old_name: str = _OLD_NAME) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for a method with the parameter `cache`, which gives it the name that transformers uses.

    Or for one that passes a cache on among other arguments, so that the warning names the line of the caller.

    If that name is `cache`, the old one is taken too, with transformers' own warning; both at once raise ValueError. If
    it is the old name, `cache` is an unknown argument.

    Args:
        old_name: the parameter's name before transformers 5.24.
    """
    if CACHE == "cache":
        return deprecate_kwarg(old_name, _NO_LONGER_TAKEN, new_name="cache", raise_if_both_names=True)

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)
        if "cache" not in signature.parameters:
            return method

        @wraps(method)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            if "cache" in kwargs:
                raise TypeError(
                    f"{method.__name__}() got an unexpected argument 'cache': transformers {transformers.__version__} "
                    f"calls it {old_name!r}"
                )
            if old_name in kwargs:
                kwargs["cache"] = kwargs.pop(old_name)
            return method(*args, **kwargs)

        parameters = [p.replace(name=old_name) if p.name == "cache" else p for p in signature.parameters.values()]
        renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return renamed

    return decorate


def cache_in(arguments: Mapping[str, Any]) -> Cache | None:
    """The cache among a model's keyword arguments, under either name that this version of transformers takes.

    Raises:
        ValueError: there are two caches, of which transformers would use one.
    """
    cache, old = arguments.get(CACHE), arguments.get(_OLD_NAME)
    if cache is not None and old is not None and old is not cache:
        raise ValueError(f"{CACHE} and {_OLD_NAME} are two caches, and a model takes one: pass {CACHE} alone")
    return old if cache is None else cache
