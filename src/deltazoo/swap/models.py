"""Model and configuration classes of swapped models, made from the original classes when they are first needed.

A swapped Llama is a `DeltazooLlamaForCausalLM` with a `DeltazooLlamaConfig` of model type `deltazoo_llama`, whose
`delta_layers` records the options of each swapped layer. The Auto classes load such a checkpoint after `import
deltazoo`. transformers alone refuses it, so nobody loads it with softmax attention and random weights by mistake.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import transformers
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.generation import GenerationMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from deltazoo.generation.cache import cache_in, check_cache, prepare_cache_layer, takes_cache
from deltazoo.generation.hf_generate import CapturedGeneration
from deltazoo.models.captured_training import capture_library_blocks, release_library_blocks
from deltazoo.models.config_keys import HEADS, SharedConfig, auto_class_name
from deltazoo.models.delta_layers import ModelWithDeltaLayers, declare_gates
from deltazoo.models.forward_arguments import (
    ROW_HEAD,
    describe_arguments,
    refuse_several_documents,
    remove_pre_hook,
    tell_of_row_head,
    tells_of_row_head,
)
from deltazoo.models.outside_rules import module_of_rule
from deltazoo.models.saving import refuse_undescribed
from deltazoo.names import SWAPPED_PREFIX
from deltazoo.ops import ContextParallel
from deltazoo.runtime import RUNTIME_OPTIONS
from deltazoo.swap.families import FAMILIES, decoder_layers_of
from deltazoo.swap.layer import build_swapped_attention

_AUTO_CLASSES: tuple[Any, ...] = tuple(getattr(transformers, auto_class_name(head)) for head in HEADS)
_PREFIX = "Deltazoo"
_ADAPTED = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules", "_tp_plan", "_fsdp_plan")
"""Properties that transformers collects from the layers when a model is made."""
_TOKEN_MASK = "delta_token_mask"
"""The argument by which `generate` passes the padding when it has prepared the masks of softmax layers."""


def recorded_layers(config: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    """Options of the swapped layers that run, by number; the configuration has strings for numbers, as JSON does."""
    if not config.delta_layers:
        raise ValueError(
            f"a {type(config).__name__} without delta_layers describes no model; swap_attention writes them"
        )
    layers = {int(index): options for index, options in config.delta_layers.items()}
    # from_pretrained(..., num_hidden_layers=n) keeps the first n layers, and so does early exit during a call.
    return {index: options for index, options in layers.items() if index < config.num_hidden_layers}


class SwappedModel(ModelWithDeltaLayers):
    """Additions of a swapped model, with any head, to the original."""

    original_class: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        runtime = {name: kwargs.pop(name) for name in RUNTIME_OPTIONS if name in kwargs}
        super().__init__(config, *args, **kwargs)
        family = FAMILIES[config.original_model_type]
        decoder_layers = decoder_layers_of(self, family)
        for index, options in recorded_layers(config).items():
            # Raises if the rule's module is missing.
            module_of_rule(options["variant"], config.mixer_module, remote_code=False)
            attention = build_swapped_attention(family, config, index, options)
            setattr(decoder_layers[index], family.attention, attention)
        _adapt(self)
        self.set_runtime(**runtime)

    # transformers reads these from the source of a class's module and remembers them, so they ask the original class.

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls.original_class._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.original_class._can_set_experts_implementation()

    def prepare_cache(self, cache: Cache) -> None:
        """Make a fresh cache fit this model's swapped layers, in place; ValueError if it cannot."""
        for index in recorded_layers(self.config):
            prepare_cache_layer(cache, index)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as transformers does.

        Raises:
            ValueError: a swapped layer is not of the kind that the configuration describes, and would load as another;
                `remote_code=True`, which transformers would ignore.
        """
        if kwargs.pop("remote_code", False):
            raise ValueError(
                "remote_code=True works for deltazoo's own models, not for swapped ones: save without it, and import "
                "deltazoo in the process that loads the checkpoint"
            )
        self.refuse_undescribed_layers()
        super().save_pretrained(*args, **kwargs)

    def refuse_undescribed_layers(self) -> None:
        """Raise ValueError if a swapped layer differs from the layer that the configuration would load in its slot."""
        family, config = FAMILIES[self.config.original_model_type], self.config
        for index, options in recorded_layers(config).items():
            found: Any = decoder_layers_of(self, family)[index].get_submodule(family.attention)
            with torch.device("meta"):
                described = build_swapped_attention(family, config, index, options)
            path = f"{family.layers}.{index}.{family.attention}"
            refuse_undescribed(found, described, path)
            refuse_undescribed(found.delta, described.delta, f"{path}.delta")


class SwappedGeneration(CapturedGeneration, GenerationMixin):
    """Generation with swapped layers."""

    @takes_cache()
    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *, attention_mask: Any = None, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Inputs of the original, and the padding where masks are prepared before the model is called."""
        given = {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds, **kwargs}
        inputs = super().prepare_inputs_for_generation(input_ids, **given)
        return inputs | _token_mask_argument(attention_mask, inputs)


def turn_into_swapped(model: PreTrainedModel, delta_layers: dict[str, dict[str, Any]]) -> None:
    """Give a live model whose slots hold swapped layers the swapped class; its configuration records the layers."""
    model.__class__ = swapped_class(type(model))
    model.config.__class__ = model.config_class  # type: ignore[assignment]
    model.config.delta_layers = delta_layers
    rule = next(iter(delta_layers.values()))["variant"]
    model.config.mixer_module = module_of_rule(rule, None)
    _adapt(model)


def turn_back(model: PreTrainedModel) -> None:
    """Undo `turn_into_swapped`, once the slots hold the original attention again."""
    swapped_name = type(model).__name__
    model.base_model._delta_hook.remove()  # type: ignore[operator, union-attr]
    release_library_blocks(model.base_model)
    del model.base_model._delta_hook, model.config.delta_layers, model.config.mixer_module
    remove_pre_hook(model, tells_of_row_head)
    for part in _parts(model):
        vars(part).pop("runtime", None)
        for name, value in part._original_properties.items():  # type: ignore[operator, union-attr]
            setattr(part, name, value)
        del part._original_properties
        part.__class__ = part.original_class  # type: ignore[assignment]
    model.config.__class__ = model.config_class  # type: ignore[assignment]
    if model.config.architectures == [swapped_name]:  # a save in between has set it
        model.config.architectures = [type(model).__name__]


def _adapt(model: PreTrainedModel) -> None:
    """Set the base model's class and hook, parallel plans and float32 parameters for the swapped layers."""
    base = model.base_model
    if not isinstance(base, SwappedModel):
        base.__class__ = swapped_class(type(base))
    describe = partial(_describe, tuple(inspect.signature(base.forward).parameters))
    base._delta_hook = base.register_forward_pre_hook(describe, with_kwargs=True)  # type: ignore[assignment]
    capture_library_blocks(base)
    tell_of_row_head(model)
    for part in _parts(model):
        part._original_properties = {name: getattr(part, name, None) for name in _ADAPTED}  # type: ignore[assignment]
        declare_gates(part)
        names = {re.sub(r"\b\d+\b", "*", name) for name, _ in (*part.named_modules(), *part.named_parameters())}
        part._tp_plan = {entry: style for entry, style in (part._tp_plan or {}).items() if entry in names}


def _parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The base model, and the model around it if there is one."""
    base = model.base_model
    return [base] if base is model else [base, model]  # type: ignore[list-item]


def _swapped_config_class(original_config: type[Any]) -> type[Any]:
    members = {
        "__doc__": f"{original_config.__name__} of a model some of whose attention layers are delta-rule layers.",
        "__annotations__": {"delta_layers": dict | None, "mixer_module": str | None},
        "model_type": SWAPPED_PREFIX + original_config.model_type,
        "original_model_type": original_config.model_type,
        "delta_layers": None,
        "mixer_module": None,
    }
    return _make(_PREFIX + original_config.__name__, (SharedConfig, original_config), members, strict)


def swapped_class(original_class: type[Any]) -> type[Any]:
    """The class of models of `original_class` with swapped layers."""
    bases: tuple[type, ...] = (SwappedModel, original_class)
    if issubclass(original_class, GenerationMixin):
        bases = (SwappedModel, SwappedGeneration, original_class, GenerationMixin)
    members = {
        "__doc__": f"{original_class.__name__} with delta-rule layers in some of its attention slots.",
        "config_class": _swapped_config_class(original_class.config_class),
        "original_class": original_class,
    }
    made = _make(_PREFIX + original_class.__name__, bases, members)
    # Models register this at construction, and output_hidden_states needs it; a class changed later does not register.
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(made), original_class._can_record_outputs)
    return made


def original_classes(config_class: type[PreTrainedConfig]) -> dict[Any, type[PreTrainedModel]]:
    """Model classes that the Auto classes of transformers load for an original configuration class."""
    found = {auto_class: auto_class._model_mapping.get(config_class, None) for auto_class in _AUTO_CLASSES}
    return {auto_class: model_class for auto_class, model_class in found.items() if model_class is not None}


def _make(
    name: str,
    bases: tuple[type, ...],
    members: dict[str, Any],
    decorate: Callable[[type[Any]], type[Any]] = lambda made: made,
) -> type[Any]:
    """The class of a name in this module, where pickle finds it; made at the first call."""
    made = globals()
    if name not in made:
        made[name] = decorate(type(name, bases, {**members, "__module__": __name__, "__qualname__": name}))
    return made[name]


def __getattr__(name: str) -> type[Any]:
    """The swapped class of a name, for pickled models and configurations that a new process reads."""
    original_class = getattr(transformers, name.removeprefix(_PREFIX), None) if name.startswith(_PREFIX) else None
    config = getattr(original_class, "config_class", original_class)
    if getattr(config, "model_type", None) not in FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, as transformers has no such class")
    register_swapped_classes(config.model_type)  # type: ignore[union-attr]
    return _swapped_config_class(config) if original_class is config else swapped_class(original_class)  # type: ignore[arg-type]


def register_swapped_classes(model_type: str) -> None:
    """Register one family's swapped models with the Auto classes; `model_type` is the original one."""
    original_config = CONFIG_MAPPING[model_type]
    config = _swapped_config_class(original_config)
    AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto_class, original_class in original_classes(original_config).items():
        auto_class.register(config, swapped_class(original_class), exist_ok=True)
    conversions = get_checkpoint_conversion_mapping(model_type)
    if conversions is not None:
        register_checkpoint_conversion_mapping(config.model_type, conversions, overwrite=True)


def _describe(
    names: tuple[str, ...], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    """The forward pre-hook of a base model, which describes the batch to its swapped layers.

    The mask that reaches an attention layer is about pairs of tokens, perhaps within a sliding window, and no longer
    says which tokens are padding. So the description (`generation/batch.py`) is made of the caller's arguments. It
    becomes one more keyword argument, which every model passes on to its attention. An argument survives recomputation
    under gradient checkpointing, and compiled code needs no guard for it.
    """
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    context: ContextParallel | None = model.deltazoo_context
    row_head = kwargs.pop(ROW_HEAD, None)
    tokens = kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if tokens is None or kwargs.get("delta_batch") is not None:
        return (), kwargs  # the model itself raises; or the batch is described already
    cache, position_ids = cache_in(kwargs), kwargs.get("position_ids")
    past_length: int | Tensor = 0
    if cache is not None:
        check_cache(cache, model.config.num_hidden_layers)
        past_length = cache.get_seq_length()
    mask = _token_mask(kwargs)
    batch = describe_arguments(context, tokens, cache, past_length, kwargs | {"attention_mask": mask})
    kwargs["delta_batch"] = batch
    if batch.beyond_one_row:
        refuse_several_documents(row_head)
    if context is not None:
        kwargs |= {"attention_mask": None, "position_ids": batch.position_ids, "use_cache": False}
    elif position_ids is None and isinstance(mask, Tensor):
        # Otherwise padding on the left would turn keys further, and a decay per channel does not commute with
        # rotations.
        kwargs["position_ids"] = batch.position_ids
    kwargs.pop("cu_seqlens", None)  # transformers does not know this name
    if batch.packed:
        # The softmax layers that remain tell documents apart by position_ids, and only without a mask.
        masked = kwargs.pop("attention_mask", None) is not None
        kwargs["position_ids"] = batch.sequences.positions if masked or position_ids is None else position_ids
        kwargs["use_cache"] = False
    return (), kwargs


def _token_mask(kwargs: dict[str, Any]) -> Tensor | Mapping[str, Tensor | None] | None:
    """The mask of real tokens: the caller's, or that of `_token_mask_argument` if `generate` has prepared masks."""
    mask = kwargs.get("attention_mask")
    if _TOKEN_MASK in kwargs:
        return {"linear_attention": kwargs.pop(_TOKEN_MASK)}
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return mask
    found = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
    raise ValueError(
        f"a swapped model takes attention_mask [batch, tokens] with 1 = real token, got {found}: a linear layer cannot "
        "follow a mask over pairs of tokens"
    )


def _token_mask_argument(attention_mask: Tensor | None, inputs: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """An argument with the padding among the tokens of a generation step whose masks are prepared already.

    It is None for single tokens, which are never padding, so that compiled decoding has the same arguments at every
    step.
    """
    prepared = inputs.get("attention_mask")
    if prepared is None or prepared is attention_mask or (isinstance(prepared, Tensor) and prepared.ndim == 2):
        return {}
    tokens = inputs.get("input_ids")
    num_tokens = (inputs["inputs_embeds"] if tokens is None else tokens).shape[1]
    if attention_mask is None or num_tokens == 1:
        return {_TOKEN_MASK: None}
    mask = attention_mask[:, -num_tokens:].bool()
    return {_TOKEN_MASK: None if not torch.compiler.is_compiling() and bool(mask.all()) else mask}
