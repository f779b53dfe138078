"""Transformers models of a few thousand parameters, one per family whose attention can be swapped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import deltazoo

VOCAB = 61
NUM_LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    # Larger than in training: the outputs of attention must show in the logits.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GEMMA = {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh"}
_ALTERNATING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {**_GEMMA, "layer_types": _ALTERNATING},
    "gemma3_text": {**_GEMMA, "layer_types": _ALTERNATING},
    "phi3": {},
    "gpt_neox": {"num_key_value_heads": None, "hidden_act": "gelu"},
    "gpt2": {
        "num_key_value_heads": None,
        "intermediate_size": None,
        "n_inner": 48,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
    "olmo2": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {"attention_bias": True, "residual_multiplier": 0.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
}
"""What differs from `SIZES` per family; None drops a size that the family does not have."""

FLOAT32_ONLY = ["gemma2"]
"""Eager softmax of capped scores computes in float32 at any dtype, where float64's mask value overflows."""
SLIDING = ["mistral", "gemma2", "gemma3_text"]
CHOICES: dict[str, Any] = {"one": [1], "half": "1:1", "all": "all"}


def tiny_original(family: str, auto_class: Any = AutoModelForCausalLM, **overrides: Any) -> Any:
    """A model of the family, in evaluation mode, always with the same weights."""
    torch.manual_seed(1)
    sizes = {key: value for key, value in {**SIZES, **OWN[family], **overrides}.items() if value is not None}
    config = AutoConfig.for_model(family, **{"eos_token_id": None, **sizes})
    # The grouped matrix product of the experts' other implementation does not support float64.
    experts = {"experts_implementation": "eager"} if "experts" in "".join(OWN[family]) else {}
    model = auto_class.from_config(config, **experts).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "ln_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))  # ones and zeros would hide mixed-up parameters
    return model


def swapped(
    family: str = "llama",
    layers: Any = "1:1",
    rule: str = "gated_deltanet",
    auto_class: Any = AutoModelForCausalLM,
    *,
    exact: bool = False,
    sizes: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Such a model of these sizes with swapped layers, `exact` as of `precise`; `options` are of `swap_attention`."""
    model = tiny_original(family, auto_class, **(sizes or {}))
    model = precise(family, model) if exact else model
    deltazoo.swap_attention(model, rule, layers, **options)
    return model


def precise(family: str, model: Any) -> Any:
    """The model in float64, where rounding hides nothing, if its family can."""
    return model if family in FLOAT32_ONLY else model.double()


def close(family: str) -> dict[str, float]:
    """Tolerances for two computations of one quantity by such a model, of sizes around one."""
    return dict.fromkeys(("rtol", "atol"), 1e-4 if family in FLOAT32_ONLY else 1e-9)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
