"""Models of a few thousand parameters, one per case that a test of `deltazoo.models` must hold for."""

from __future__ import annotations

from typing import Any

import torch
from few_rules import FEW_RULES
from torch import Tensor

import deltazoo
from deltazoo.models import (
    CombaConfig,
    DeltaNetConfig,
    DeltaRuleConfig,
    DeltaRuleForCausalLM,
    EFLAConfig,
    GatedDeltaNetConfig,
    GatedDeltaProductConfig,
    GatedLinearAttentionConfig,
    KDAConfig,
    PrecondGatedDeltaNetConfig,
    PrecondKDAConfig,
)
from deltazoo.models.hub import model_class_of
from deltazoo.runtime import RUNTIME_OPTIONS

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
OPTIONS: dict[str, dict[str, Any]] = {mixer: {"mixer": mixer} for mixer in deltazoo.list_rules()} | {
    "without_conv": {"use_short_conv": False},
    "kda_without_conv": {"mixer": "kda", "use_short_conv": False, "gate_bias": False},
    "grouped_values": {"num_v_heads": 4, "expand_v": 1.5},
    "micro_steps": {"mixer": "neg_gated_deltanet", "num_micro_steps": 2},
    "erase_only": {"mixer": "neg_delta_net", "neg_eigval": "erase"},
    "tied": {"tie_word_embeddings": True},
    "hybrid": HYBRID,
    "hybrid_softmax_first": {**HYBRID, "layer_types": ["full_attention", "linear_attention"]},
    "hybrid_without_conv": {**HYBRID, "use_short_conv": False},
    "hybrid_kda": {**HYBRID, "mixer": "kda", "qkv_bias": True, "softmax_qk_norm": True},
    "softmax_only": {**HYBRID, "layer_types": ["full_attention", "full_attention"]},
}
"""Every mixer, and what else may change how states are kept."""

CONFIGS = {
    "delta_rule": DeltaRuleConfig,
    "delta_net": DeltaNetConfig,
    "gated_deltanet": GatedDeltaNetConfig,
    "kda": KDAConfig,
    "efla": EFLAConfig,
    "gated_deltaproduct": GatedDeltaProductConfig,
    "comba": CombaConfig,
    "precond_kda": PrecondKDAConfig,
    "precond_gated_deltanet": PrecondGatedDeltaNetConfig,
    "gla": GatedLinearAttentionConfig,
}


CASES = [*(case for case in OPTIONS if case in FEW_RULES or case not in deltazoo.list_rules())]
"""With the mixers on which shared code takes every path (few_rules.py). Every rule in pure, hybrid and swapped
models, decoded and reloaded, is what the tests of `deltazoo check` try."""
TYPES = ["delta_rule", "delta_net", "gated_deltanet", "kda", "efla", "gla"]
"""Few: most types differ from the generic one in nothing that a model does. That of GLA renames a parameter."""
FEW = ["gated_deltanet", "kda_without_conv", "hybrid", "hybrid_without_conv"]
"""With and without convolutions, pure and hybrid: for tests that hardly depend on the mixer."""
STATES = [*FEW, "pkda", "grouped_values", "micro_steps", "hybrid_softmax_first", "softmax_only"]
"""With every kind of tensor that a layer keeps: for the ways to decode, which move what is kept and do not read it."""


def tiny_config(case: str, **overrides: Any) -> DeltaRuleConfig:
    """Of the generic type with a case's options."""
    return _config("delta_rule", **{**OPTIONS[case], **overrides})


def tiny_model(case: str, **overrides: Any) -> DeltaRuleForCausalLM:
    """In evaluation mode, always with the same weights; `overrides` are configuration keys and runtime options."""
    runtime = _pop_runtime(overrides)
    return _model(tiny_config(case, **overrides), "ForCausalLM", runtime)


def tiny_named(model_type: str, suffix: str = "ForCausalLM", **overrides: Any) -> Any:
    """A model of a Hub type: its causal language model, or the class with that suffix."""
    runtime = _pop_runtime(overrides)
    return _model(_config(model_type, **overrides), suffix, runtime)


def _pop_runtime(overrides: dict[str, Any]) -> dict[str, Any]:
    return {name: overrides.pop(name) for name in RUNTIME_OPTIONS if name in overrides}


def _config(model_type: str, **options: Any) -> DeltaRuleConfig:
    return CONFIGS[model_type](**{**SIZES, **options})


def _model(config: DeltaRuleConfig, suffix: str, runtime: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return model_class_of(type(config), suffix)(config, **runtime).eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
