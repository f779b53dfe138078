"""Formats that other programs read, as data: which models fit, names of keys and parameters, and their meaning.

Names of parameters are those in files of published checkpoints, which vLLM, SGLang, MLX and llama.cpp read; in memory
transformers has some of them joined. Imports no torch: `deltazoo show` lists the formats.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deltazoo.spec import get_rule

__all__ = ["FORMATS", "TARGETS", "Format", "Need", "Row", "fla_type", "targets_of"]


class Need(NamedTuple):
    """The value, or the name of another key with that value, that a format asks of a configuration key of ours."""

    key: str
    value: Any
    reason: str
    """Why it can express no other."""

    def wanted(self, config: Any) -> Any:
        """The value in a model: of another key, if one is named."""
        return getattr(config, self.value, self.value) if isinstance(self.value, str) else self.value


class Row(NamedTuple):
    """One parameter of theirs, made of one or several of ours."""

    theirs: str
    ours: tuple[str, ...]
    form: str = "joined"
    """How it is made: a key of `deltazoo.compat.native.forms.FORMS`."""


@dataclass(frozen=True)
class Format:
    """A model type of transformers that can hold models of ours."""

    rules: tuple[str, ...]
    """Rules that it computes, the one of models that are read from it first."""
    architecture: str
    """Its class for causal language models."""
    no_hybrids: str | None
    """Why it cannot hold our softmax layers; None: it can."""
    choice: str
    """What a new model must say to fit, beyond the defaults, in words; may be empty."""
    needs: tuple[Need, ...]
    keys: Mapping[str, str]
    """Configuration keys: theirs, and ours of the same value."""
    constants: Mapping[str, Any]
    """Values of further keys of theirs, in every file that we write or read."""
    derived: Callable[[Any], dict[str, Any]]
    """Further keys of theirs, from our configuration."""
    filler: Mapping[str, Any]
    """Sizes of the softmax layer of zeros that a model without softmax layers gets: transformers and others ask for
    one, and as a block of zeros it adds nothing to the residual stream."""
    model: tuple[Row, ...]
    linear: tuple[Row, ...]
    """Of a block with a linear layer; names within `model.layers.N.`."""
    softmax: tuple[Row, ...] = ()
    """Of a block with a softmax layer."""
    softmax_needs: tuple[Need, ...] = ()
    """Further needs of models with softmax layers."""
    also_named: Mapping[str, str] = field(default_factory=dict)
    """Parts of names in files that transformers writes, and what they stand for."""


_NEEDS = (
    Need("use_short_conv", True, "its layers have short convolutions"),
    Need("use_gate", True, "its layers gate their output"),
    Need("beta_bias", False, "its step sizes have no bias"),
    Need("num_micro_steps", 1, "its layers take one step per token"),
    Need("decay_lower_bound", None, "its decay has no bound"),
)
_NEVER_DOUBLED = Need("allow_neg_eigval", False, "its step sizes end at 1")
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "initializer_range",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "pad_token_id": "pad_token_id",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "linear_conv_kernel_dim": "conv_size",
}
_GATED_KEYS = {
    **_KEYS,
    "linear_num_key_heads": "num_heads",
    "linear_num_value_heads": "num_v_heads",
    "linear_key_head_dim": "head_dim",
}


def _value_width(config: Any) -> dict[str, Any]:
    return {"linear_value_head_dim": round(config.head_dim * config.expand_v)}


def _heads_of_zeros(hidden_size: int) -> int:
    """Number of heads in a softmax layer of zeros whose heads divide the model's width, of 128 channels if they can."""
    return next((hidden_size // channels for channels in (128, 64, 32, 16, 8) if hidden_size % channels == 0), 1)


def _kimi_layers(config: Any) -> dict[str, Any]:
    """The kinds of the blocks, as transformers reads them and as others do; ours are dense, and linear but the last."""
    blocks = config.num_hidden_layers + 1
    return {
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


def _same(*names: str, prefix: str = "", theirs: str | None = None) -> tuple[Row, ...]:
    """Rows of parameters whose names differ in the prefix alone."""
    return tuple(Row((prefix if theirs is None else theirs) + name, (prefix + name,)) for name in names)


def _model(norm: str) -> tuple[Row, ...]:
    embeddings = Row("model.embed_tokens.weight", ("model.embeddings.weight",))
    return embeddings, Row("model.norm.weight", ("model.norm.weight",), norm), *_same("lm_head.weight")


def _block(norm: str) -> tuple[Row, ...]:
    return (
        Row("input_layernorm.weight", ("attn_norm.weight",), norm),
        Row("post_attention_layernorm.weight", ("mlp_norm.weight",), norm),
        *_same("gate_proj.weight", "up_proj.weight", "down_proj.weight", prefix="mlp."),
    )


_CONVOLUTIONS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
_OUTPUT = ("o_norm.weight", "o_proj.weight")
_QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def _ours(*names: str) -> tuple[str, ...]:
    return tuple(f"attn.{name}.weight" for name in names)


_QWEN_LINEAR = (
    *_block("zero_centred"),
    *_same("A_log", "dt_bias", prefix="attn.", theirs="linear_attn."),
    Row("linear_attn.conv1d.weight", _ours("q_conv1d", "k_conv1d", "v_conv1d")),
    Row("linear_attn.norm.weight", _ours("o_norm")),
    Row("linear_attn.out_proj.weight", _ours("o_proj")),
)
_QWEN_SOFTMAX = (
    *_block("zero_centred"),
    Row("self_attn.q_proj.weight", _ours("q_proj"), "beside_gate"),
    Row("self_attn.k_proj.weight", _ours("k_proj")),
    Row("self_attn.v_proj.weight", _ours("v_proj")),
    Row("self_attn.o_proj.weight", _ours("o_proj"), "doubled"),
    Row("self_attn.q_norm.weight", _ours("q_norm"), "zero_centred"),
    Row("self_attn.k_norm.weight", _ours("k_norm"), "zero_centred"),
)


def _qwen(architecture: str, projections: tuple[Row, ...], **constants: Any) -> Format:
    return Format(
        rules=("gated_deltanet",),
        architecture=architecture,
        no_hybrids=None,
        choice="softmax_qk_norm=True in hybrids",
        needs=(*_NEEDS, _NEVER_DOUBLED),
        softmax_needs=(
            Need("softmax_qk_norm", True, "its softmax layers normalise queries and keys"),
            Need("qkv_bias", False, "with biases of queries, its softmax layers have others that ours lack"),
        ),
        keys=_GATED_KEYS,
        constants={"hidden_act": "silu", "attention_bias": False, **constants},
        derived=_value_width,
        filler={"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64},
        model=_model("zero_centred"),
        linear=(*_QWEN_LINEAR, *projections),
        softmax=_QWEN_SOFTMAX,
    )


FORMATS: Mapping[str, Format] = {
    "olmo_hybrid": Format(
        rules=("gated_deltanet", "neg_gated_deltanet"),
        architecture="OlmoHybridForCausalLM",
        no_hybrids="its softmax blocks have their norms behind the layers, ours before them",
        choice="norm_eps=1e-5",
        needs=(
            *_NEEDS,
            Need("norm_eps", 1e-5, "its output norm has the epsilon 1e-5 in every model"),
            Need("neg_eigval", "both", "it doubles the step of erasing and writing alike"),
        ),
        keys={**_GATED_KEYS, "linear_allow_neg_eigval": "allow_neg_eigval"},
        constants={"hidden_act": "silu", "attention_bias": False},
        derived=lambda config: {**_value_width(config), "num_attention_heads": _heads_of_zeros(config.hidden_size)},
        filler={"num_key_value_heads": 1, "rope_parameters": None},
        model=_model("joined"),
        linear=(
            *_block("joined"),
            *_same("A_log", "dt_bias", *_CONVOLUTIONS, *_QKV, prefix="attn.", theirs="linear_attn."),
            *_same("a_proj.weight", "b_proj.weight", "g_proj.weight", *_OUTPUT, prefix="attn.", theirs="linear_attn."),
        ),
        also_named={
            ".attention_layer_norm.": ".input_layernorm.",
            ".feedforward_layer_norm.": ".post_attention_layernorm.",
        },
    ),
    "qwen3_5_text": _qwen(
        "Qwen3_5ForCausalLM",
        (
            Row("linear_attn.in_proj_qkv.weight", _ours("q_proj", "k_proj", "v_proj")),
            Row("linear_attn.in_proj_z.weight", _ours("g_proj")),
            Row("linear_attn.in_proj_b.weight", _ours("b_proj")),
            Row("linear_attn.in_proj_a.weight", _ours("a_proj")),
        ),
    ),
    "qwen3_next": _qwen(
        "Qwen3NextForCausalLM",
        (
            Row("linear_attn.in_proj_qkvz.weight", _ours("q_proj", "k_proj", "v_proj", "g_proj"), "by_key_head"),
            Row("linear_attn.in_proj_ba.weight", _ours("b_proj", "a_proj"), "by_key_head"),
        ),
        num_experts=0,
    ),
    "kimi_linear": Format(
        rules=("kda",),
        architecture="KimiLinearForCausalLM",
        no_hybrids="its softmax layers compress keys and values and know no positions",
        choice="gate_bias=False",
        needs=(
            *_NEEDS,
            _NEVER_DOUBLED,
            Need("gate_bias", False, "its output gate has no bias"),
            Need("expand_v", 1, "its values are as wide as its keys"),
            Need("num_v_heads", "num_heads", "it has as many heads of values as of keys"),
        ),
        keys={**_KEYS, "linear_num_heads": "num_heads", "linear_head_dim": "head_dim"},
        constants={"hidden_act": "silu", "mla_use_nope": True},
        derived=_kimi_layers,
        filler={
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        model=_model("joined"),
        linear=(
            *_block("joined"),
            *_same("dt_bias", *_CONVOLUTIONS, *_QKV, "b_proj.weight", *_OUTPUT, prefix="attn.", theirs="self_attn."),
            Row("self_attn.A_log", ("attn.A_log",), "per_head"),
            Row("self_attn.f_a_proj.weight", _ours("f_proj.0")),
            Row("self_attn.f_b_proj.weight", _ours("f_proj.1")),
            Row("self_attn.g_a_proj.weight", _ours("g_proj.0")),
            Row("self_attn.g_b_proj.weight", _ours("g_proj.1")),
        ),
        also_named={".block_sparse_moe.": ".mlp."},
    ),
}
"""By the model type of transformers."""

TARGETS = (*FORMATS, "fla")
"""The formats that `deltazoo.export` writes."""

_FLA_TYPES = {"neg_delta_net": "delta_net", "neg_gated_deltanet": "gated_deltanet"}
"""Rules that are options of another rule's model type."""


_FLA_NEEDS = (
    Need("beta_bias", False, "its step sizes have no bias"),
    Need("neg_eigval", "both", "it doubles the step of erasing and writing alike"),
)


_FLA_SOFTMAX_NEEDS = (Need("softmax_qk_norm", False, "its softmax layers have no norms of queries and keys"),)


def needs_of(target: str, *, hybrid: bool) -> tuple[Need, ...]:
    """What a format asks of a model, with or without softmax layers."""
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


def rows_of(known: Format, config: Any, blocks: Sequence[int]) -> Iterator[Row]:
    """All parameters by their full names.

    Args:
        known: their format.
        config: ours.
        blocks: number of their block for each of ours.
    """
    for row in known.model:
        if not (row.theirs == "lm_head.weight" and config.tie_word_embeddings):
            yield row
    for index, (block, layer_type) in enumerate(zip(blocks, config.layer_types, strict=True)):
        for row in known.linear if layer_type == "linear_attention" else known.softmax:
            ours = tuple(f"model.layers.{index}.{name}" for name in row.ours)
            yield Row(f"model.layers.{block}.{row.theirs}", ours, row.form)


def fla_type(rule: str) -> str | None:
    """The model type of fla-hub that computes a rule; None: it has none."""
    return _FLA_TYPES.get(rule, get_rule(rule).hub_model_type)


def targets_of(rule: str) -> list[str]:
    """The formats that can hold models of a rule, each with what a new model must say to fit."""
    found = [f"{target} ({known.choice})" for target, known in FORMATS.items() if rule in known.rules]
    return [*found, "fla"] if fla_type(rule) else found
