"""Models of a few thousand parameters, one per case that a test of `deltazoo.models` must hold for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import deltazoo
from deltazoo.models import (
    DeltaNetConfig,
    DeltaRuleConfig,
    DeltaRuleForCausalLM,
    EFLAConfig,
    GatedDeltaNetConfig,
    KDAConfig,
    named,
)

VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    # Larger than in training: the outputs of the mixers must show in the logits.
    "initializer_range": 0.2,
}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OPTIONS: dict[str, dict[str, Any]] = {mixer: {"mixer": mixer} for mixer in deltazoo.list_variants()} | {
    "without_conv": {"use_short_conv": False},
    "kda_without_conv": {"mixer": "kda", "use_short_conv": False},
    "grouped_values": {"num_v_heads": 4, "expand_v": 1.5},
    "micro_steps": {"mixer": "neg_gated_deltanet", "num_micro_steps": 2},
    "erase_only": {"mixer": "neg_delta_net", "neg_eigval": "erase"},
    "tied": {"tie_word_embeddings": True},
    "hybrid": HYBRID,
    "hybrid_softmax_first": {**HYBRID, "layer_types": ["full_attention", "linear_attention"]},
    "hybrid_without_conv": {**HYBRID, "use_short_conv": False},
    "hybrid_kda": {**HYBRID, "mixer": "kda", "qkv_bias": True},
    "softmax_only": {**HYBRID, "layer_types": ["full_attention", "full_attention"]},
}
"""Every mixer, and what else may change how states are kept."""

FEW = ["gated_deltanet", "kda_without_conv", "hybrid", "hybrid_without_conv"]
"""With and without convolutions, pure and hybrid: for tests that hardly depend on the mixer."""

CONFIGS = {
    "delta_rule": DeltaRuleConfig,
    "delta_net": DeltaNetConfig,
    "gated_deltanet": GatedDeltaNetConfig,
    "kda": KDAConfig,
    "efla": EFLAConfig,
}


def tiny_config(case: str, **overrides: Any) -> DeltaRuleConfig:
    return DeltaRuleConfig(**{**SIZES, **OPTIONS[case], **overrides})


def tiny_model(case: str, **overrides: Any) -> DeltaRuleForCausalLM:
    """In evaluation mode, always with the same weights."""
    torch.manual_seed(1)
    return DeltaRuleForCausalLM(tiny_config(case, **overrides)).eval()


def tiny_named(model_type: str, suffix: str = "ForCausalLM", **overrides: Any) -> Any:
    """A model of a Hub type: its causal language model, or the class with that suffix."""
    config_class = CONFIGS[model_type]
    torch.manual_seed(1)
    name = config_class.__name__.removesuffix("Config") + suffix
    model_class = getattr(named, name, None) or getattr(deltazoo.models, name)
    return model_class(config_class(**{**SIZES, **overrides})).eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
