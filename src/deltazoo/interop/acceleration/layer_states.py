"""The states of an accelerated layer, read from and written to the model's cache as its original code does.

So a cache stays valid across `accelerate` and `restore`. Beam search, static caches and offloading are transformers'
own.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

__all__ = ["keep_states", "stored_states"]


def stored_states(cache: Cache, layer_idx: int, taps: int) -> tuple[Tensor | None, Tensor | None]:
    """The convolution's last inputs `[B, C, taps]` and the recurrent state `[B, HV, K, V]`; None before any token."""
    layer: Any = cache.layers[layer_idx]
    if not layer.has_previous_state[0]:
        return None, None
    return layer.conv_states[0][..., -taps:], layer.recurrent_states[0]


def keep_states(cache: Cache, layer_idx: int, new_inputs: Tensor, window: Tensor, state: Tensor) -> None:
    """Write the states after T more tokens to the cache.

    Args:
        cache: of the model.
        layer_idx: the layer's index in it.
        new_inputs: `[B, T, C]`, the inputs of the convolution.
        window: `[B, taps, C]`, the last of all inputs so far.
        state: `[B, HV, K, V]` float32.
    """
    # A cache from which tokens may be taken back keeps all inputs until it is cropped.
    layer: Any = cache.layers[layer_idx]
    kept = new_inputs if layer.record_past else window
    cache.update_conv_state(kept.transpose(1, 2), layer_idx, conv_kernel_size=window.shape[1])
    cache.update_recurrent_state(state, layer_idx)
