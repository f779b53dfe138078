"""The configuration of all models with delta-rule layers.

The keys have the names that fla-hub gives them, where it has them. A key given to the constructor acts or is refused.
Three kinds of keys are kept with one warning although they do not act: keys that others wrote into a `config.json`,
attributes that others set, and keys of softmax layers or short convolutions in a model that has none.
"""

import math
import os
import warnings
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
import transformers
from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationConfig

from deltazoo.generation.batch import LAYER_TYPES
from deltazoo.generation.cache import CACHE
from deltazoo.layers import LayerOptions, layer_class, make_layer
from deltazoo.layers.mlp import default_intermediate_size
from deltazoo.models.config_keys import SharedConfig, not_a_key, without_runtime_options
from deltazoo.models.fla_keys import translate_fla_config
from deltazoo.models.outside_rules import module_of_rule
from deltazoo.models.softmax_attention import check_softmax_layers, with_softmax_heads
from deltazoo.names import did_you_mean, one_slip_away, unknown
from deltazoo.runtime import RUNTIME_OPTIONS
from deltazoo.spec import RuleSpec, get_rule

# Keys that the dataclass lacks, and that PreTrainedConfig reads or transformers writes into config.json.
_BASE_KEYS = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "prefix",
        "quantization_config",
        "rope_scaling",
        "rope_theta",
        "tie_last_hidden_states",
        "tokenizer_class",
        "torch_dtype",
    }
)

# Options of linear layers that must be right in a model of softmax layers too.
_CHECKED_IN_ALL_MODELS = (
    *("hidden_size", "num_heads", "head_dim", "num_v_heads"),
    *("norm_eps", "initializer_range", "conv_initializer_range"),
)
# Keys that act on softmax layers alone.
_SOFTMAX_KEYS = ("num_attention_heads", "num_key_value_heads", "rope_parameters", "qkv_bias", "softmax_qk_norm")


@lru_cache(maxsize=256, typed=True)
def _check_layer(layer: type, **options: Any) -> None:
    """Make a layer of this class without memory: its constructor checks the options. Those that pass do so once."""
    with torch.device("meta"):
        make_layer(**options, layer_idx=0)


@strict
class DeltaRuleConfig(SharedConfig, PreTrainedConfig):
    """Configuration of a causal language model of delta-rule layers, softmax layers, or both.

    Args:
        mixer: name of the rule of the linear layers, one of `deltazoo.list_rules()`.
        mixer_module: the module that registers `mixer`, if it does not come with deltazoo; filled in automatically.
            Loading a config.json does not import it: import it before, or pass its file to the command line with
            `--load`.
        mixer_revision: number of the rule's revision, for rules that were corrected (docs/layers.md); default the
            newest. A saved configuration without this key has the first.
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks; a block is a linear or softmax layer and an MLP.
        num_heads: heads of queries and keys in the linear layers.
        num_v_heads: heads of values, a multiple of `num_heads`; default `num_heads`.
        head_dim: channels per query/key head; default `hidden_size // num_heads`.
        expand_v: channels of a value head relative to `head_dim`; default as in the rule's paper.
        use_short_conv: short causal convolutions on queries, keys and values.
        conv_size: taps of the short convolutions.
        conv_initializer_range: standard deviation of their initial taps; default uniform within 1 / sqrt(conv_size).
        use_gate: whether the linear layers gate their output; default as in the rule's paper.
        allow_neg_eigval: step sizes up to 2, so that transition eigenvalues reach -1; default as in the rule.
        neg_eigval: `"both"` doubles the step size of erasing and writing, `"erase"` that of erasing alone.
        decay_lower_bound: bounded decay gate instead of the softplus gate; default as in the rule.
        beta_bias: whether the step size's projection has a bias.
        gate_bias: whether a low-rank output gate (KDA and others) has a bias.
        num_micro_steps: keys, values and step sizes per token, applied one after another (DeltaProduct,
            arXiv:2502.10297); default as in the rule.
        intermediate_size: width of the SwiGLU MLP; default `hidden_ratio * hidden_size * 2/3`, rounded up to 256.
        hidden_ratio: see `intermediate_size`.
        norm_eps: epsilon of every RMSNorm.
        initializer_range: standard deviation of the initial weights.
        tie_word_embeddings: whether embedding and output head are one matrix.
        max_position_embeddings: longest sequence in tokens; RoPE scalings and tools that choose a length read it.
        layer_types: per block `"linear_attention"` or `"full_attention"`; default all linear.
        num_attention_heads: heads of the softmax layers.
        num_key_value_heads: key/value heads of the softmax layers; default `num_attention_heads`.
        qkv_bias: biases on the query, key and value projections of the softmax layers.
        softmax_qk_norm: RMSNorms of the queries and keys of each head of the softmax layers, before the rotation.
        rope_parameters: rotary embedding of the softmax layers; default plain RoPE with theta 10,000.
        classifier_dropout: dropout before the token classification head; default 0.1.
        use_cache: whether a forward pass outside training returns a cache.
        training_data: a description of the data the weights were trained on, for the model card.

    A model without softmax layers accepts the five keys of softmax layers with a warning, and a model without short
    convolutions accepts `conv_initializer_range` and a `conv_size` other than 4.

    Raises:
        ValueError: unknown keys (the message names the nearest), unknown names, sizes that do not fit together. In a
            saved configuration an unknown key is refused only if it is one character away from a key above. Keys of
            generation, such as `temperature`, which older versions of transformers wrote there, are dropped from it.
        NotImplementedError: keys of fla-hub that stand for a model which our layers do not compute.

    The defaults follow fla-hub's configurations; sizes per paper are in `configs/`.
    """

    model_type: ClassVar[str] = "delta_rule"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [CACHE]
    base_model_pp_plan: ClassVar[dict[str, Any]] = {
        "embeddings": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "batch"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    """Inputs and outputs of each pipeline stage."""
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "embeddings": "free_full_weight",
        "layers.*": "free_full_weight",
        "norm": "keep_full_weight",
    }
    """Modules that FSDP2 gathers as one group, and whether it frees the group after the forward pass. Models of half
    precision add their gates (`deltazoo.models.delta_layers.declare_gates`)."""

    mixer: str = "gated_deltanet"
    mixer_module: str | None = None
    mixer_revision: int | None = None
    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_heads: int = 16
    num_v_heads: int | None = None
    head_dim: int | None = None
    expand_v: int | float | None = None
    use_short_conv: bool = True
    conv_size: int = 4
    conv_initializer_range: float | None = None
    use_gate: bool | None = None
    allow_neg_eigval: bool | None = None
    neg_eigval: str = "both"
    decay_lower_bound: float | None = None
    beta_bias: bool = False
    gate_bias: bool = True
    num_micro_steps: int | None = None
    intermediate_size: int | None = None
    hidden_ratio: int | float | None = 4
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    layer_types: list[str] | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    qkv_bias: bool = False
    softmax_qk_norm: bool = False
    rope_parameters: dict | None = None
    classifier_dropout: float | int | None = None
    use_cache: bool = True
    training_data: str | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **extra: Any) -> None:
        if self.transformers_version is not None:  # a saved configuration; older versions of deltazoo saved them
            extra = without_runtime_options(extra)
            self.mixer_revision = 1 if self.mixer_revision is None else self.mixer_revision
        self.mixer_module = module_of_rule(self.mixer, self.mixer_module)
        extra = self._take_fla_keys(extra)
        idle = self._keys_of_others(extra)
        self._fill_defaults()
        gives_rope = self.rope_parameters or extra.get("rope_scaling") or extra.get("rope_theta")
        super().__post_init__(**extra)
        if not gives_rope and "full_attention" not in (self.layer_types or ()):
            self.rope_parameters = None
        idle |= self._idle_keys()
        self.validate_architecture()
        if idle:
            kept = ", ".join(f"{key!r} ({reason})" for key, reason in sorted(idle.items()))
            warnings.warn(f"{type(self).__name__}: keys that do not act on this model are kept: {kept}", stacklevel=2)

    def __setattr__(self, key: str, value: Any) -> None:
        if key in RUNTIME_OPTIONS:
            raise AttributeError(not_a_key(key))
        # Tools set attributes on a configuration, which are then saved. A misspelt key of ours is refused.
        if not (key.startswith("_") or key in self.__dict__ or hasattr(type(self), key)):
            meant = one_slip_away(key, _OWN_KEYS)
            if meant:
                raise AttributeError(f"{type(self).__name__}: unknown key {key!r}; did you mean {meant!r}?")
        super().__setattr__(key, value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """The configuration of a dictionary, see transformers; keys that others wrote are kept, with one warning."""
        # This key tells a saved configuration from the arguments of a caller.
        return super().from_dict({"transformers_version": transformers.__version__, **config_dict}, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the configuration, see transformers.

        Raises:
            ValueError: values that were set later contradict each other, so the saved file could not be loaded.
        """
        try:
            type(self)(**self.to_diff_dict())
        except (ValueError, NotImplementedError) as error:
            raise ValueError(
                f"{type(self).__name__} cannot be saved, as it could not be loaded again: {error}"
            ) from error
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain values."""
        values = super().to_dict()
        # PEFT and others read these keys as numbers where they exist.
        missing = [key for key in ("num_attention_heads", "num_key_value_heads") if values[key] is None]
        return {key: value for key, value in values.items() if key not in missing}

    @property
    def spec(self) -> RuleSpec:
        """The spec of the linear layers: that of `mixer`, with or without output gate as `use_gate` says."""
        spec = get_rule(self.mixer, self.mixer_revision)
        if self.use_gate == (spec.output_gate != "none"):
            return spec
        return replace(spec, output_gate="full" if self.use_gate else "none")

    @property
    def layer_options(self) -> dict[str, Any]:
        """The arguments of `deltazoo.layers.DeltaRuleAttention`, without the layer index."""
        options = {field.name: getattr(self, field.name) for field in fields(LayerOptions) if field.name in _OWN_KEYS}
        if not self.use_short_conv:  # a layer refuses options that do not act
            options |= {"conv_size": LayerOptions.conv_size, "conv_initializer_range": None}
        return {"rule": self.spec, **options}

    def validate_architecture(self) -> None:
        """Raise ValueError unless names are known and sizes fit together."""
        get_rule(self.mixer)
        assert self.layer_types is not None  # filled by _fill_defaults
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim", "intermediate_size")
        for name in (*sizes, "num_micro_steps", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id must be at least 0 and less than vocab_size = {self.vocab_size}, or None, got "
                f"{self.pad_token_id}"
            )
        for layer_type in self.layer_types:
            if layer_type not in LAYER_TYPES:
                raise ValueError(f"layer_types: {unknown('layer type', layer_type, LAYER_TYPES)}")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must name num_hidden_layers={self.num_hidden_layers} layers, got {len(self.layer_types)}"
            )
        if "full_attention" in self.layer_types:
            check_softmax_layers(self)
        options = self.layer_options
        if "linear_attention" not in self.layer_types:  # options of linear layers do not act and may disagree
            options = {"rule": "gated_deltanet", **{name: options[name] for name in _CHECKED_IN_ALL_MODELS}}
        layer: Any = layer_class(options["rule"])  # hashable, which mypy does not see
        _check_layer(layer, **options, num_layers=self.num_hidden_layers)

    def validate_rope(self) -> None:
        """Run transformers' check of `rope_parameters` with the size of softmax heads in place of `head_dim`."""
        if "full_attention" in (self.layer_types or ()):
            PreTrainedConfig.validate_rope(with_softmax_heads(self))

    def _fill_defaults(self) -> None:
        spec = get_rule(self.mixer, self.mixer_revision)
        self.mixer_revision = spec.revision
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"num_heads must divide hidden_size = {self.hidden_size} unless head_dim is given, "
                    f"got {self.num_heads}"
                )
            self.head_dim = self.hidden_size // self.num_heads
        if self.intermediate_size is None:
            ratio = 4 if self.hidden_ratio is None else self.hidden_ratio
            if not 0 < ratio < math.inf:
                raise ValueError(f"hidden_ratio must be finite and positive, got {ratio}")
            self.intermediate_size = default_intermediate_size(self.hidden_size, ratio)
        defaults = {
            "num_v_heads": self.num_heads,
            "use_gate": spec.output_gate != "none",
            **{name: getattr(spec, name) for name in ("expand_v", "allow_neg_eigval", "num_micro_steps")},
            "layer_types": ["linear_attention"] * self.num_hidden_layers,
            "num_key_value_heads": self.num_attention_heads,
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, default)

    def _take_fla_keys(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Set our keys from those of fla-hub, and return the further keys."""
        own = {field.name: getattr(self, field.name) for field in fields(DeltaRuleConfig)}
        translated = translate_fla_config({**own, **extra})
        for name in own:
            if translated[name] != own[name]:
                setattr(self, name, translated[name])
        return {key: value for key, value in translated.items() if key not in own}

    def _idle_keys(self) -> dict[str, str]:
        """Our keys that do not act on this model, with the reason."""
        idle = {}
        if "full_attention" not in (self.layer_types or ()):
            reason = "acts on softmax layers, and layer_types has none"
            idle = {key: reason for key in _SOFTMAX_KEYS if getattr(self, key)}
        for key in ("conv_size", "conv_initializer_range"):
            if not self.use_short_conv and getattr(self, key) != getattr(type(self), key):
                idle[key] = "acts with use_short_conv=True"
        return idle

    def _keys_of_others(self, extra: dict[str, Any]) -> dict[str, str]:
        """Unknown keys in a saved configuration, with a remark on each.

        Raises:
            ValueError: the key is a caller's, a runtime option, or one character away from a key of ours.
        """
        generation_keys = GenerationConfig._get_default_generation_params()  # older versions of transformers saved them
        found = {}
        for key in extra:
            if key in _BASE_KEYS or (key in generation_keys and self.transformers_version is not None):
                continue
            if key in generation_keys:
                raise ValueError(
                    f"{key} says how a model generates, and is no key of its configuration: pass it to generate, or "
                    f"set model.generation_config.{key}"
                )
            if key in RUNTIME_OPTIONS:
                raise ValueError(not_a_key(key))
            if self.transformers_version is None or one_slip_away(key, _OWN_KEYS):
                raise ValueError(
                    f"{type(self).__name__}: {unknown('key', key, [field.name for field in fields(self)])}"
                )
            found[key] = f"unknown{did_you_mean(key, _OWN_KEYS, cutoff=0.75)}"
        return found


_OWN_KEYS = [field.name for field in fields(DeltaRuleConfig) if field.name in DeltaRuleConfig.__annotations__]
