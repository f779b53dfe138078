"""Frequencies of the rotary embedding of softmax layers, plain or with any of transformers' scalings."""

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if TYPE_CHECKING:
    from deltazoo.models.configuration import DeltaRuleConfig

__all__ = ["default_frequencies", "rotary_frequencies", "with_softmax_heads"]


def with_softmax_heads(config: "DeltaRuleConfig") -> "DeltaRuleConfig":
    """A copy whose `head_dim` is that of the softmax layers, which transformers' RoPE functions read."""
    assert config.num_attention_heads is not None
    copied = copy.copy(config)
    copied.head_dim = config.hidden_size // config.num_attention_heads
    return copied


def default_frequencies(config: "DeltaRuleConfig") -> tuple[Tensor, float]:
    """`theta^(-2i/d)` in radians per position, and the scale of cosines and sines; d channels of a head turn."""
    assert config.rope_parameters is not None and config.head_dim is not None
    channels = int(config.head_dim * (config.rope_parameters.get("partial_rotary_factor") or 1.0))
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    return config.rope_parameters["rope_theta"] ** -exponents, 1.0


def rotary_frequencies(config: "DeltaRuleConfig") -> tuple[Tensor, float]:
    """As `default_frequencies`, for any `rope_type`; the configuration is one `with_softmax_heads`."""
    assert config.rope_parameters is not None
    rope_type = config.rope_parameters["rope_type"]
    return default_frequencies(config) if rope_type == "default" else ROPE_INIT_FUNCTIONS[rope_type](config)
