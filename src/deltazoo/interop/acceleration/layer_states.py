"""The states of an accelerated layer, read from and written to the model's cache as its original code does.

So a cache stays valid across `accelerate` and `restore`. Beam search, static caches and offloading are transformers'
own. A cache from which tokens may be taken back gets a layer that can (`CroppableLinearLayer`).
"""

from typing import Any

import torch
from transformers.cache_utils import Cache

from deltazoo.generation.recorded_calls import CroppableLinearLayer
from deltazoo.layers.state import MixerState, Replay

__all__ = ["keep_state", "record_call", "stored_state"]


def stored_state(cache: Cache | None, layer_idx: int, taps: int) -> MixerState | None:
    """The convolution's last inputs `[B, C, taps]` and the recurrent state `[B, HV, K, V]`; None before any token.

    Where gradients are recorded they are copies, since autograd saves them and `keep_state` overwrites the cache's.
    """
    if cache is None:
        return None
    layer: Any = cache.layers[layer_idx]
    if not layer.has_previous_state[0]:
        return None
    conv, recurrent = layer.conv_states[0][..., -taps:], layer.recurrent_states[0]
    return MixerState(conv.clone(), recurrent.clone()) if torch.is_grad_enabled() else MixerState(conv, recurrent)


def record_call(cache: Cache, layer_idx: int, replay: Replay, num_tokens: int) -> None:
    """Remember a call, before its state is kept, if the cache must be able to take its tokens back."""
    layer: Any = cache.layers[layer_idx]
    if layer.record_past:
        CroppableLinearLayer.of(layer).record(replay, num_tokens)


def keep_state(cache: Cache, layer_idx: int, state: MixerState) -> None:
    """Write the state after some more tokens to the cache."""
    assert state.conv is not None
    cache.update_conv_state(state.conv, layer_idx, conv_kernel_size=state.conv.shape[-1])
    cache.update_recurrent_state(state.recurrent, layer_idx)
