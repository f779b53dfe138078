"""What caches take: keys and values of softmax layers against states of delta-rule layers, per sequence."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig

from deltazoo.layers import DeltaRuleAttention
from deltazoo.swap.attention_weights import HeadShape
from deltazoo.swap.swap_report import CONTEXTS, MemoryAtLength

__all__ = ["memory_of_swap", "sliding_window", "state_bytes"]


def state_bytes(layer: DeltaRuleAttention) -> int:
    """Bytes of one sequence's state: the recurrent one in float32, the convolutions' inputs in the model's dtype."""
    recurrent = layer.num_v_heads * layer.head_k_dim * layer.head_v_dim * torch.float32.itemsize
    if not layer.conv_size:
        return recurrent
    channels = layer.q_proj.out_features + layer.k_proj.out_features + layer.v_proj.out_features
    return recurrent + channels * (layer.conv_size - 1) * layer.q_proj.weight.element_size()


def memory_of_swap(
    config: PreTrainedConfig, shape: HeadShape, dtype: torch.dtype, num_layers: int, states: Mapping[int, int]
) -> tuple[MemoryAtLength, ...]:
    """Caches before and after, at the lengths of `CONTEXTS`.

    Args:
        config: of the original model, which says where windows are.
        shape: of its attention layers.
        dtype: of keys and values.
        num_layers: of the model.
        states: bytes of the state of each swapped layer.
    """
    per_token = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    windows = [sliding_window(config, index) for index in range(num_layers)]

    def at(num_tokens: int) -> MemoryAtLength:
        kept = [per_token * min(num_tokens, window or num_tokens) for window in windows]
        after = [states.get(index, size) for index, size in enumerate(kept)]
        return MemoryAtLength(num_tokens, sum(kept), sum(after))

    return tuple(at(length) for length in CONTEXTS.values())


def sliding_window(config: PreTrainedConfig, index: int) -> int | None:
    """Tokens that a softmax layer's cache holds at most; None: all."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[index] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)
