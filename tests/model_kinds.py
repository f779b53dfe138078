"""A tiny model of each kind that has delta-rule layers: for what must hold in all of them alike."""

from __future__ import annotations

from functools import partial
from typing import Any

from foreign_models import COMMON, FAMILIES, with_weights
from tiny_families import tiny_original
from tiny_models import tiny_named
from transformers import AutoConfig, AutoModelForCausalLM

import deltazoo

KINDS = ["pure", "hybrid", "swapped", "accelerated"]
_HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4, "num_hidden_layers": 2}


def model_of_kind(kind: str, auto_class: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """In evaluation mode, with the head of the Auto class, whose token 0 is padding."""
    if kind == "swapped":
        model = tiny_original("llama", auto_class, **options)
        deltazoo.swap_attention(model, "gated_deltanet", "1:1")
    elif kind == "accelerated":
        config = AutoConfig.for_model("qwen3_next", **{**COMMON, **FAMILIES["qwen3_next"][2], **options})
        # The grouped matrix product of the experts' other implementation does not support float64.
        model = with_weights(partial(auto_class.from_config, experts_implementation="eager"), config)
        deltazoo.accelerate(model)
    else:
        sizes = _HYBRID if kind == "hybrid" else {}
        suffix = auto_class.__name__.removeprefix("AutoModel")
        model = tiny_named("gated_deltanet", suffix, pad_token_id=0, **sizes, **options)
    return model.eval()
