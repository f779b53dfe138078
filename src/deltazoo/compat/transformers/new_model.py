"""A new model of transformers' own class on our operators, and the names by which other programs read its files."""

import json
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deltazoo.compat.native.checkpoints import replaced_tokenizer
from deltazoo.compat.transformers import accelerate
from deltazoo.compat.transformers.arrangements import LAYER_ARRANGEMENTS
from deltazoo.compat.transformers.packing import layers_over_neighbours
from deltazoo.names import unknown
from deltazoo.runtime import RuntimeOptions

_WITHOUT_EFFECT = ("use_cache", "pretraining_tp", "mtp_loss_scaling_factor")
"""Fields of configurations that training in transformers' classes does not read."""

_SERVED_NAMES = {
    "olmo_hybrid": {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
}
"""Parts of names that transformers writes into files, and the names that vLLM and SGLang read, by model type.

When saving, transformers undoes in every layer a renaming that it does in some layers when loading; OLMo Hybrid's
softmax layers then have a norm that no program looks for. transformers loads files with the other names as well.
"""


def architectures() -> list[str]:
    """The model types of transformers with delta-rule layers and a causal language model of text alone."""
    return [
        name
        for name in _model_types()
        if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not CONFIG_MAPPING[name].sub_configs
    ]


def _model_types() -> list[str]:
    """The model types of transformers with delta-rule layers, some of them with images."""
    families = dict.fromkeys(arrangement.family for arrangement in LAYER_ARRANGEMENTS.values())
    return [name for family in families for name in (family, f"{family}_text") if name in CONFIG_MAPPING]


def build_native_model(section: dict[str, Any], tokens: dict[str, Any], runtime: RuntimeOptions) -> PreTrainedModel:
    """A new model of transformers' class with `deltazoo.accelerate`, with weights drawn from torch's global generator.

    Args:
        section: ``architecture``, a model type, and fields of its configuration class.
        tokens: further fields from the tokenizer: the vocabulary size and the ids of the special tokens.
        runtime: ``backend`` and ``fused_kernels``, see `deltazoo.accelerate`.

    Raises:
        ValueError: an unknown architecture or field, a field without effect, sizes that do not fit together, no linear
            or no softmax layers, or other layers that would mix packed documents.
        StrictDataclassError: a value of the wrong type.
    """
    keys = dict(section)
    name = keys.pop("architecture")
    known = architectures()
    if name in _model_types() and name not in known:
        raise ValueError(
            f"model.architecture={name} is in transformers no language model of text alone; known: {', '.join(known)}"
        )
    if name not in known:
        raise ValueError(f"model.architecture: {unknown('model type', name, known)}")
    config_class: Any = CONFIG_MAPPING[name]
    _check_keys(name, config_class, keys, tokens)
    config = config_class(**tokens, **keys)
    _check_layers(name, config)
    _check_sizes(config)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ArithmeticError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"model: {name} cannot be built with these fields: {type(error).__name__}: {error}") from error
    _check_experts(model)
    accelerate(model, **runtime.given())
    return model


def refuse_unrunnable(model: PreTrainedModel) -> None:
    """Raise ValueError if the shapes of a model on the meta device do not fit together.

    A forward pass there finds errors that the construction does not.
    """
    tokens = torch.zeros(1, 8, dtype=torch.long, device="meta")
    masks = dict.fromkeys(("full_attention", "linear_attention"))  # transformers would read values to make them
    model.set_experts_implementation("batched_mm")  # other implementations read values or need bfloat16
    try:
        model.base_model(input_ids=tokens, attention_mask=masks, use_cache=False)
    except NotImplementedError:
        return  # an operator has no meta implementation, which says nothing about the model
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        name = model.config.model_type
        raise ValueError(f"model: {name} cannot run with these fields: {type(error).__name__}: {error}") from error


def refuse_replaced_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if transformers would load another tokenizer with a checkpoint of the model."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        replaced = replaced_tokenizer(tokenizer, folder)
    if replaced is not None:
        raise ValueError(
            f"transformers {transformers.__version__} loads a {replaced} with every checkpoint of "
            f"{model.config.model_type}, which would split text in another way than this tokenizer: give "
            "tokenizer.kind=pretrained and one of that class as tokenizer.path, or train another model.architecture"
        )


def write_served_names(model: PreTrainedModel, folder: Path) -> None:
    """Rename parameters in the files of a saved model so that vLLM and SGLang find them."""
    names = _SERVED_NAMES.get(model.config.model_type)
    if names is None:
        return

    def served(name: str) -> str:
        for written, read in names.items():
            name = name.replace(f".{written}.", f".{read}.")
        return name

    for path in folder.glob("*.safetensors"):
        tensors = {served(name): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    for path in folder.glob("*.safetensors.index.json"):
        index = json.loads(path.read_text(encoding="utf-8"))
        index["weight_map"] = {served(name): file for name, file in index["weight_map"].items()}
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _check_keys(name: str, config_class: type[PreTrainedConfig], keys: dict[str, Any], tokens: dict[str, Any]) -> None:
    """Raise ValueError for a key that would have no effect; the configuration would keep it silently."""
    general = {field.name for field in fields(PreTrainedConfig)} | set(_WITHOUT_EFFECT)
    own = [field.name for field in fields(config_class) if field.name not in general | set(tokens)]
    for key in keys:
        if key in general - set(tokens):
            raise ValueError(f"model.{key} has no effect on the training of {name}: leave it out")
        if key not in own:
            raise ValueError(unknown(f"field of {name}", key, own, within="model."))
    if "output_router_logits" in keys and "router_aux_loss_coef" not in own:
        raise ValueError(f"model.output_router_logits: transformers' {name} has no load balancing loss; leave it out")
    if "router_aux_loss_coef" in keys and not keys.get("output_router_logits"):
        raise ValueError("model.router_aux_loss_coef acts only with model.output_router_logits=true")


def _check_layers(name: str, config: Any) -> None:
    """Raise ValueError for layers that our trainer cannot train, or that transformers cannot run afterwards."""
    mixing = layers_over_neighbours(config)
    if mixing is not None:
        raise ValueError(
            f"model.architecture={name} cannot be trained here: its {mixing} would mix the documents that share a row"
        )
    if "linear_attention" not in config.layer_types:
        raise ValueError(f"model.layer_types={config.layer_types} has no linear_attention, for which this trainer is")
    if "full_attention" not in config.layer_types:
        raise ValueError(
            f"model.layer_types={config.layer_types} has no full_attention, in whose cache transformers counts the "
            "tokens: the model could not generate; a model of linear layers alone is model.mixer"
        )


def _check_sizes(config: Any) -> None:
    """Raise ValueError for sizes with which the model could be built but not run."""
    shared = ("num_attention_heads", "num_key_value_heads"), ("linear_num_value_heads", "linear_num_key_heads")
    for many, few in shared:
        heads, groups = getattr(config, many, None), getattr(config, few, None)
        if heads is not None and groups is not None and (groups < 1 or heads % groups):
            raise ValueError(f"model.{many}={heads} must be a multiple of model.{few}={groups}")
    for name in ("initializer_range", "rms_norm_eps", "attention_dropout"):
        value = getattr(config, name, None)
        if value is not None and value < 0:
            raise ValueError(f"model.{name} must not be negative, got {value}")


def _check_experts(model: PreTrainedModel) -> None:
    config: Any = model.config
    if not any(name.endswith(".experts") for name, _ in model.named_modules()):
        if getattr(config, "output_router_logits", False):
            raise ValueError("model.output_router_logits=true balances experts, and no layer has experts")
        return
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(config, name) % 8 or getattr(config, name) < 1:
            raise ValueError(
                f"model.{name}={getattr(config, name)} must be a multiple of 8 in a model with experts, whose matrix "
                "products are grouped"
            )
