"""Tiny models of transformers' delta-rule families, as many as the installed version has, with random weights."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import deltazoo
from deltazoo.compat.transformers.arrangements import LAYER_ARRANGEMENTS

VOCAB = 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GDN = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "mlp_layer_types": ["dense"] * 2,
}

# Family: model class, config class, options beyond COMMON.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**GDN, **EXPERTS, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", GDN),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {**GDN, **EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "qwen4_exp": (
        "Qwen4ExpForCausalLM",
        "Qwen4ExpTextConfig",
        {**GDN, **EXPERTS, "shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 8,
         "output_gate_type": "sigmoid", "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
         "indexer_budget": 32, "indexer_compress_ratio": 2},
    ),
    "lara_mini": (
        "LaraMiniForCausalLM",
        "LaraMiniConfig",
        {**GDN, **EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", {**GDN, "linear_allow_neg_eigval": True}),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {**MLA, "qk_rope_head_dim": 8, "linear_num_heads": 2, "linear_head_dim": 8},
    ),
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        {**MLA, "qk_rope_head_dim": 8, "head_dim": 8, "num_mtp_layers": 0},
    ),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        "Glm5NextConfig",
        {**MLA, "qk_rope_head_dim": 0, "q_lora_rank": 8, "linear_num_heads": 2, "linear_head_dim": 8,
         "index_topk": 32, "index_kpool": 2, "index_head_dim": 8, "index_n_heads": 2, "hc_mult": 2},
    ),
}  # fmt: skip
INSTALLED = [name for name in FAMILIES if importlib.util.find_spec(f"transformers.models.{name}")]
"""Older versions of transformers have fewer of these models."""


def has_fused_convolution(family: str) -> bool:
    """Whether the installed version arranges the family's layer as the newest does.

    OLMo Hybrid once had three convolutions per layer and a cache class of its own; `accelerate` refuses that.
    """
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return not hasattr(modeling, "OlmoHybridShortConvolution")


FUSED = [name for name in INSTALLED if has_fused_convolution(name)]
SPARSE_SOFTMAX = ["qwen4_exp", "glm5_next"]
"""Families whose softmax layers choose a few blocks of neighbouring tokens.

Their configurations turn "full_attention" into such layers, by a name that differs between versions of transformers.
"""


def foreign_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """In evaluation mode, always with the same weights, whose effect shows in the logits."""
    model_name, config_name, options = FAMILIES[family]
    package = f"transformers.models.{family}"
    config_class = getattr(importlib.import_module(f"{package}.configuration_{family}"), config_name)
    options = {**COMMON, **options, **overrides}
    if family == "glm5_next":
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32, "num_heads": 2}
        config = config_class(text_config=options, vision_config=vision, image_token_id=VOCAB - 1)
    else:
        config = config_class(**options)
    model_class = getattr(importlib.import_module(f"{package}.modeling_{family}"), model_name)
    return with_weights(model_class, config).to(dtype).eval()


def accelerated(family: str, **overrides: Any) -> Any:
    model = foreign_model(family, **overrides)
    deltazoo.accelerate(model)
    return model


def with_weights(model_class: Any, config: Any) -> Any:
    torch.manual_seed(1)
    model = model_class(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not name.endswith("A_log"):
                parameter.normal_(std=0.2, generator=generator)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def model_with_pictures(family: str) -> Any:
    """The model of Qwen3.5 that also takes pictures, `VOCAB - 1` in place of each of their tokens."""
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = FAMILIES[family][1].removesuffix("TextConfig")
    vision = {
        **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32, "num_heads": 2},
        **{"patch_size": 4, "temporal_patch_size": 1, "spatial_merge_size": 2, "num_position_embeddings": 16},
    }
    special = {"image_token_id": VOCAB - 1, "video_token_id": VOCAB - 2, "vision_start_token_id": VOCAB - 3}
    config = getattr(configuration, f"{name}Config")(
        text_config={**COMMON, **FAMILIES[family][2]}, vision_config=vision, **special
    )
    return with_weights(getattr(modeling, f"{name}ForConditionalGeneration"), config).eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB - 1, shape, generator=torch.Generator().manual_seed(seed))


def mixer_of(model: Any) -> Any:
    """The model's one delta-rule layer."""
    (mixer,) = [x for x in model.modules() if type(x).__name__.removeprefix("Accelerated") in LAYER_ARRANGEMENTS]
    return mixer


DECAY_PARAMETERS = (
    "A_log",
    "dt_bias",
    "a_proj.weight",
    "in_proj_a.weight",
    "in_proj_ba.weight",
    "f_proj.weight",
    "f_a_proj.weight",
    "f_b_proj.weight",
)


def shaken(model: Any) -> Any:
    """A copy with every weight moved by about one unit in its last place."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            eps = torch.finfo(parameter.dtype).eps
            parameter.mul_(1 + eps * torch.randn_like(parameter))
    return model


def assert_equal_but_for_rounding(
    run: Callable[[Any], dict[str, Tensor]], model: Any, actual: dict[str, Tensor], factor: float = 8.0
) -> None:
    """`actual` is what `run(model)` gives, within `factor` times what rounding the weights differently changes in it.

    Another order of summation cannot be asked to do better.
    Gradients of the decay are sums over a chunk of 64 tokens whose terms cancel (docs/math.md), the more so
    the stronger the decay; their rounding errors add up, at worst, over that length.
    """
    assert_within_rounding(run(model), run(shaken(model)), actual, factor)


def assert_within_rounding(
    expected: dict[str, Tensor], moved: dict[str, Tensor], actual: dict[str, Tensor], factor: float = 8.0
) -> None:
    """As above, of what `run` gives for the model, and for the shaken one."""
    assert actual.keys() == expected.keys()
    wrong = []
    for name, x in expected.items():
        allowed = factor * (moved[name].double() - x.double()).norm() * (64 if name.endswith(DECAY_PARAMETERS) else 1)
        error = (actual[name].double() - x.double()).norm()
        if not error <= allowed:
            wrong.append(f"{name}: error {error:.1e} > {allowed:.1e}, size {x.double().norm():.1e}")
    assert not wrong, wrong
