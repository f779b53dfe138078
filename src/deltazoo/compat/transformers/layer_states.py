"""The states of an accelerated layer, read from and written to the model's cache as its original code does.

So a cache stays valid across `accelerate` and `restore`. Beam search, static caches and offloading are transformers'
own, but for a cache that records tokens to take them back: transformers would take back the convolution's alone.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from deltazoo.generation.cache import (
    DeltaRuleCacheLayer,
    layer_of_cache,
    not_of_a_linear_layer,
    refuse_to_go_back,
)
from deltazoo.layers.state import LayerState

__all__ = ["keep_state", "stored_state"]


def stored_state(cache: Cache | None, layer_idx: int, taps: int, qkv: Tensor) -> LayerState | None:
    """The convolution's last inputs `[B, C, taps]` and the recurrent state `[B, HV, K, V]`; None before any token.

    Where gradients are recorded they are copies, since autograd saves them and `keep_state` overwrites the cache's.

    Args:
        cache: of the model.
        layer_idx: which layer asks.
        taps: of its convolution.
        qkv: `[B, T, C]`, what it convolves now.

    Raises:
        ValueError: the cache is of another model, or of another number of rows.
        RuntimeError: the cache records tokens, to take them back.
    """
    if cache is None:
        return None
    layer = layer_of_cache(cache, layer_idx)
    if not isinstance(layer, LinearAttentionCacheLayerMixin) or isinstance(layer, DeltaRuleCacheLayer):
        raise not_of_a_linear_layer(layer, layer_idx)
    if layer.record_past:
        refuse_to_go_back()
    if not layer.has_previous_state[0]:
        return None
    conv: Any = layer.conv_states[0]
    conv = conv[..., -taps:]
    if conv.shape[:2] != (qkv.shape[0], qkv.shape[2]):
        raise ValueError(
            f"the convolution state must have shape {(qkv.shape[0], qkv.shape[2], taps)}, got {tuple(conv.shape)}: the "
            "cache belongs to another model, or has other rows"
        )
    recurrent: Any = layer.recurrent_states[0]
    return LayerState(conv.clone(), recurrent.clone()) if torch.is_grad_enabled() else LayerState(conv, recurrent)


def keep_state(cache: Cache, layer_idx: int, state: LayerState) -> None:
    """Write the state after some more tokens to the cache."""
    assert state.conv is not None
    cache.update_conv_state(state.conv, layer_idx, conv_kernel_size=state.conv.shape[-1])
    cache.update_recurrent_state(state.recurrent, layer_idx)
