"""Formats that other programs read, as data: the models that fit, and the names of configuration keys and parameters.

The names of parameters are those in files of published checkpoints, which vLLM, SGLang, MLX and llama.cpp read;
transformers joins some of them in memory. This module imports no torch: `deltazoo show` lists the formats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from deltazoo.spec import get_rule


class Need(NamedTuple):
    """A value that a format demands of a configuration key of ours, or the name of another key with that value."""

    key: str
    value: Any
    reason: str
    """The reason why the format can express no other."""

    def wanted(self, config: Any) -> Any:
        """The demanded value, read from another key of the model if one is named."""
        return getattr(config, self.value, self.value) if isinstance(self.value, str) else self.value


@dataclass(frozen=True)
class Format:
    """A model type of transformers that can hold models of ours."""

    rules: tuple[str, ...]
    """Rules that the format computes; models that are read from it get the first."""
    architecture: str
    """Name of the format's class for causal language models."""
    choice: str
    """Keys that a new model must set to fit, beyond the defaults."""
    needs: tuple[Need, ...]
    keys: Mapping[str, str]
    """Configuration keys of the format, and our keys of the same value."""
    constants: Mapping[str, Any]
    """Values of further keys of the format, in every file that we write or read."""
    derived: Callable[[Any], dict[str, Any]]
    """Function that makes further keys of the format from our configuration."""
    filler: Mapping[str, Any]
    """Sizes of the softmax layer in the block of zeros that models without softmax layers get: transformers and others
    ask for such a layer, and zeros add nothing to the residual stream."""
    layer: str
    """Name of a linear layer in its block."""
    names: Mapping[str, str]
    """Modules of a linear layer: ours, and the format's where the name is another. Some join several of ours."""
    forms: Mapping[str, str] = field(default_factory=dict)
    """Modules of the format whose weights are made of ours by an entry of `deltazoo.compat.native.forms.FORMS`."""
    no_hybrids: str | None = None
    """The reason why the format cannot hold our softmax layers; None: it can."""
    softmax_needs: tuple[Need, ...] = ()
    """Further needs of models with softmax layers."""
    also_named: Mapping[str, str] = field(default_factory=dict)
    """Parts of names in files that transformers writes, and our names of them."""


_NEEDS = (
    Need("use_short_conv", True, "its layers have short convolutions"),
    Need("use_gate", True, "its layers gate their output"),
    Need("beta_bias", False, "its step sizes have no bias"),
    Need("num_micro_steps", 1, "its layers take one step per token"),
    Need("decay_lower_bound", None, "its decay has no bound"),
)
_NEVER_DOUBLED = Need("allow_neg_eigval", False, "its step sizes end at 1")
_DOUBLES_BOTH = Need("neg_eigval", "both", "it doubles the step of erasing and writing alike")
_SAME_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "initializer_range"),
    *("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
)
_KEYS = {**{key: key for key in _SAME_KEYS}, "rms_norm_eps": "norm_eps", "linear_conv_kernel_dim": "conv_size"}
_GATED_KEYS = {
    **_KEYS,
    "linear_num_key_heads": "num_heads",
    "linear_num_value_heads": "num_v_heads",
    "linear_key_head_dim": "head_dim",
}
_CONVOLUTIONS = dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), "conv1d")
_QWEN_FORMS = {
    **dict.fromkeys(("model.norm", "input_layernorm", "post_attention_layernorm"), "zero_centred"),
    **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), "zero_centred"),
    "self_attn.q_proj": "beside_gate",
    "self_attn.o_proj": "doubled",
}


def _value_width(config: Any) -> dict[str, Any]:
    return {"linear_value_head_dim": round(config.head_dim * config.expand_v)}


def _olmo_sizes(config: Any) -> dict[str, Any]:
    """The width of values, and heads of 128 or fewer channels that divide the model's width, for the block of zeros."""
    channels = next((n for n in (128, 64, 32, 16) if config.hidden_size % n == 0), config.hidden_size)
    return {**_value_width(config), "num_attention_heads": config.hidden_size // channels}


def _kimi_layers(config: Any) -> dict[str, Any]:
    """Keys with the kinds of the blocks, for transformers and for others: all are dense, and all but the last linear.

    llama.cpp has one number of heads for linear and softmax layers.
    """
    blocks = config.num_hidden_layers + 1
    return {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), config.num_heads),
        "mlp_layer_types": ["dense"] * blocks,
        "first_k_dense_replace": blocks,
        "moe_layer_freq": 1,
        "linear_attn_config": {
            "kda_layers": [*range(1, blocks)],
            "full_attn_layers": [blocks],
            "num_heads": config.num_heads,
            "head_dim": config.head_dim,
            "short_conv_kernel_size": config.conv_size,
        },
    }


_QWEN3_5 = Format(
    rules=("gated_deltanet",),
    architecture="Qwen3_5ForCausalLM",
    choice="softmax_qk_norm=True in hybrids",
    needs=(*_NEEDS, _NEVER_DOUBLED),
    keys=_GATED_KEYS,
    constants={"hidden_act": "silu", "attention_bias": False},
    derived=_value_width,
    filler={"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64},
    layer="linear_attn",
    names={
        **_CONVOLUTIONS,
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "in_proj_qkv"),
        **{"g_proj": "in_proj_z", "b_proj": "in_proj_b", "a_proj": "in_proj_a"},
        **{"o_norm": "norm", "o_proj": "out_proj"},
    },
    forms=_QWEN_FORMS,
    softmax_needs=(
        Need("softmax_qk_norm", True, "its softmax layers normalise queries and keys"),
        Need("qkv_bias", False, "with biases of queries, its softmax layers have others that ours lack"),
    ),
)
FORMATS: Mapping[str, Format] = {
    "olmo_hybrid": Format(
        rules=("gated_deltanet", "neg_gated_deltanet"),
        architecture="OlmoHybridForCausalLM",
        choice="norm_eps=1e-5",
        needs=(*_NEEDS, Need("norm_eps", 1e-5, "its output norm has the epsilon 1e-5 in every model"), _DOUBLES_BOTH),
        keys={**_GATED_KEYS, "linear_allow_neg_eigval": "allow_neg_eigval"},
        constants={"hidden_act": "silu", "attention_bias": False},
        derived=_olmo_sizes,
        filler={"num_key_value_heads": 1, "rope_parameters": None},
        layer="linear_attn",
        names={},
        no_hybrids="its softmax blocks have their norms behind the layers, ours before them",
        also_named={
            ".attention_layer_norm.": ".input_layernorm.",
            ".feedforward_layer_norm.": ".post_attention_layernorm.",
        },
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": replace(
        _QWEN3_5,
        architecture="Qwen3NextForCausalLM",
        constants={**_QWEN3_5.constants, "num_experts": 0},
        names={
            **_QWEN3_5.names,
            **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), "in_proj_qkvz"),
            **dict.fromkeys(("b_proj", "a_proj"), "in_proj_ba"),
        },
        forms={**_QWEN_FORMS, **dict.fromkeys(("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"), "by_key_head")},
    ),
    "kimi_linear": Format(
        rules=("kda",),
        architecture="KimiLinearForCausalLM",
        choice="gate_bias=False",
        needs=(
            *_NEEDS,
            _NEVER_DOUBLED,
            Need("gate_bias", False, "its output gate has no bias"),
            Need("expand_v", 1, "its values are as wide as its keys"),
            Need("num_v_heads", "num_heads", "it has as many heads of values as of keys"),
        ),
        keys={**_KEYS, "linear_num_heads": "num_heads", "linear_head_dim": "head_dim"},
        constants={"hidden_act": "silu"},
        derived=_kimi_layers,
        filler={
            **{"q_lora_rank": None, "kv_lora_rank": 512, "mla_use_nope": True},
            **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            **{"rope_theta": 10000.0, "moe_router_activation_func": "sigmoid"},  # MLX and llama.cpp ask for them
        },
        layer="self_attn",
        names={"f_proj.0": "f_a_proj", "f_proj.1": "f_b_proj", "g_proj.0": "g_a_proj", "g_proj.1": "g_b_proj"},
        forms={"self_attn.A_log": "per_head"},
        no_hybrids="its softmax layers compress keys and values and know no positions",
        also_named={".block_sparse_moe.": ".mlp."},
    ),
}
"""The formats by the model type of transformers."""

TARGETS = (*FORMATS, "fla")
"""The formats that `deltazoo.export` writes."""

_FLA_TYPES = {"neg_delta_net": "delta_net", "neg_gated_deltanet": "gated_deltanet"}
"""Rules that are options of another rule's model type."""
_FLA_NEEDS = (Need("beta_bias", False, "its step sizes have no bias"), _DOUBLES_BOTH)
_FLA_SOFTMAX_NEEDS = (Need("softmax_qk_norm", False, "its softmax layers have no norms of queries and keys"),)


def needs_of(target: str, *, hybrid: bool) -> tuple[Need, ...]:
    """The needs of a format, for models with or without softmax layers."""
    known = FORMATS.get(target)
    needs, softmax_needs = (known.needs, known.softmax_needs) if known else (_FLA_NEEDS, _FLA_SOFTMAX_NEEDS)
    return (*needs, *softmax_needs) if hybrid else needs


def native_values(target: str, config: Any) -> dict[str, Any]:
    """Keys and values of the configuration in which a format holds a model of ours."""
    known, layer_types = FORMATS[target], list(config.layer_types)
    values = {theirs: getattr(config, ours) for theirs, ours in known.keys.items()}
    values |= {**known.constants, **known.derived(config)}
    if "full_attention" in layer_types:
        values |= {
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.hidden_size // config.num_attention_heads,
            "rope_parameters": {"partial_rotary_factor": 1.0, **config.rope_parameters},
        }
    else:
        layer_types.append("full_attention")
        values |= known.filler
    return {**values, "layer_types": layer_types, "num_hidden_layers": len(layer_types)}


def fla_type(rule: str) -> str | None:
    """The model type of fla-hub that computes a rule; None: it has none."""
    return _FLA_TYPES.get(rule, get_rule(rule).hub_model_type)


def targets_of(rule: str) -> list[str]:
    """The formats that can hold models of a rule, each with the keys that a new model must set to fit."""
    found = [f"{target} ({known.choice})" for target, known in FORMATS.items() if rule in known.rules]
    return [*found, "fla"] if fla_type(rule) else found
