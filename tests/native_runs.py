"""Tiny models of transformers' own classes for training runs: the section ``model`` by model type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import foreign_models
from foreign_models import has_fused_convolution
from tiny_runs import run_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deltazoo.training import RunConfig
from deltazoo.training.config import as_mapping, from_mapping

SIZES = ("hidden_size", "num_hidden_layers", "layer_types", "num_attention_heads", "num_key_value_heads")
COMMON: dict[str, Any] = {key: foreign_models.COMMON[key] for key in SIZES}
GDN = {key: size for key, size in foreign_models.GDN.items() if key != "head_dim"}
MOE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MOE |= {"shared_expert_intermediate_size": 16, "output_router_logits": True}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
KIMI_MOE = {"mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4, "num_experts_per_tok": 2}

SECTIONS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**COMMON, **GDN, **MOE, "intermediate_size": 48, "mlp_only_layers": [0]},
    "qwen3_5_text": {**COMMON, **GDN, "head_dim": 8, "intermediate_size": 48},
    "qwen3_5_moe_text": {**COMMON, **GDN, **MOE},
    "lara_mini": {**COMMON, **GDN, **MOE},
    "olmo_hybrid": {**COMMON, **GDN, "intermediate_size": 48},
    "kimi_linear": {
        **{**COMMON, **MLA, **KIMI_MOE, "intermediate_size": 48, "moe_intermediate_size": 16},
        **{"linear_num_heads": 2, "linear_head_dim": 8},
    },
    "bailing_hybrid": {
        **{**COMMON, **MLA, "mlp_layer_types": ["dense"] * 2, "intermediate_size": 48},
        **{"head_dim": 8, "num_mtp_layers": 0},
    },
}
INSTALLED = [
    name
    for name in SECTIONS
    if name in CONFIG_MAPPING and (name != "olmo_hybrid" or has_fused_convolution("olmo_hybrid"))
]
"""Older versions of transformers have fewer of these models, or one that `accelerate` refuses."""


def native_config(text: Path, output: Path, architecture: str, **changes: dict[str, Any]) -> RunConfig:
    """Four steps, the section ``model`` of the architecture; ``changes`` as of `run_config`."""
    training = {"steps": 4, "save_every": 2, **changes.pop("training", {})}
    values = as_mapping(run_config(text, output, training=training, **changes))
    values["model"] = {"architecture": architecture, **SECTIONS[architecture], **changes.get("model", {})}
    return from_mapping(RunConfig, values)
