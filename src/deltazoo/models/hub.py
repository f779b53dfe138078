"""The model types of the Hub: their configurations and model classes, registered in transformers' Auto classes.

A configuration is `DeltaRuleConfig` with a fixed rule. transformers' Auto classes need one model class for every
configuration and head, under the name that checkpoints record. A loop makes them, since they differ in nothing else.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import transformers
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.generation import GenerationMixin
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deltazoo.models.config_keys import HEADS, auto_class_name, auto_map, class_name
from deltazoo.models.configuration import DeltaRuleConfig
from deltazoo.models.fla_keys import add_fla_keys
from deltazoo.models.forward_arguments import tell_of_row_head
from deltazoo.models.modeling import DeltaRuleForCausalLM, DeltaRuleModel, DeltaRulePreTrainedModel
from deltazoo.models.outside_rules import source_of_rule
from deltazoo.models.saving import write_remote_code


class _NamedConfig(DeltaRuleConfig):
    """The configuration of a Hub type: one rule, and saved keys that fla-hub's classes load."""

    further_rules: ClassVar[tuple[str, ...]] = ()
    """Further rules that a model of this type may have, chosen by other keys."""
    parameter_names: ClassVar[Mapping[str, str]] = {}
    """Ends of parameter names in checkpoints of this type, and our ends in their place."""

    def __post_init__(self, **extra: Any) -> None:
        if self.mixer not in (type(self).mixer, *self.further_rules):
            raise ValueError(
                f"model type {self.model_type!r} has the rule {type(self).mixer!r}, got mixer={self.mixer!r}; "
                "use DeltaRuleConfig for a free choice"
            )
        super().__post_init__(**extra)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain values, in our keys and in those that fla-hub's classes read."""
        return add_fla_keys(super().to_dict())


def _with_defaults(name: str, model_type: str, doc: str, **defaults: Any) -> type[DeltaRuleConfig]:
    """The configuration class of a Hub type that differs from `DeltaRuleConfig` in defaults alone."""
    fields = {key: kind for key, kind in DeltaRuleConfig.__annotations__.items() if key in defaults}
    members = {"__doc__": doc, "__module__": __name__, "__annotations__": fields, "model_type": model_type}
    return strict(type(name, (_NamedConfig,), {**members, **defaults}))


_GATED_SHAPE: dict[str, Any] = {"num_hidden_layers": 21, "num_heads": 6, "head_dim": 256}

DeltaNetConfig = _with_defaults(
    "DeltaNetConfig",
    "delta_net",
    "DeltaNet (arXiv:2406.06484); with `allow_neg_eigval=True` its rule of arXiv:2411.12537.",
    mixer="delta_net",
)
GatedDeltaNetConfig = _with_defaults(
    "GatedDeltaNetConfig", "gated_deltanet", "Gated DeltaNet (arXiv:2412.06464).", **_GATED_SHAPE
)
KDAConfig = _with_defaults("KDAConfig", "kda", "Kimi Delta Attention (arXiv:2510.26692).", mixer="kda", head_dim=128)
EFLAConfig = _with_defaults("EFLAConfig", "efla", "Error-free linear attention (arXiv:2512.12602).", mixer="efla")
GatedDeltaProductConfig = _with_defaults(
    "GatedDeltaProductConfig",
    "gated_deltaproduct",
    "Gated DeltaProduct (arXiv:2502.10297); without its decay it is DeltaNet in several steps with an output gate.",
    further_rules=("delta_net",),
    mixer="gated_deltaproduct",
    **_GATED_SHAPE,
)
CombaConfig = _with_defaults(
    "CombaConfig",
    "comba",
    "Comba (arXiv:2506.02475), with the unit key as erase key, which its checkpoints have.",
    mixer="comba_unit_erase",
    **_GATED_SHAPE,
)
PrecondGatedDeltaNetConfig = _with_defaults(
    "PrecondGatedDeltaNetConfig",
    "precond_gated_deltanet",
    "Gated DeltaNet with a preconditioned write key (arXiv:2604.21100).",
    mixer="pgdn",
    head_dim=128,
)


@strict
class PrecondKDAConfig(_NamedConfig):
    """Kimi Delta Attention with a preconditioned write key (arXiv:2604.21100)."""

    model_type: ClassVar[str] = "precond_kda"
    mixer: str = "pkda"
    head_dim: int | None = 128

    def __post_init__(self, **extra: Any) -> None:
        if self.num_v_heads not in (None, self.num_heads):
            raise NotImplementedError(
                f"model type 'precond_kda' with num_v_heads={self.num_v_heads} and num_heads={self.num_heads} is not "
                "implemented: its checkpoints have one moment of the keys per value head, and DeltaRuleConfig with "
                "mixer='pkda' one per key head"
            )
        super().__post_init__(**extra)


@strict
class GatedLinearAttentionConfig(_NamedConfig):
    """Gated linear attention (arXiv:2312.06635)."""

    model_type: ClassVar[str] = "gla"
    parameter_names: ClassVar[Mapping[str, str]] = {"attn.g_norm_swish_gate.weight": "attn.o_norm.weight"}
    mixer: str = "gla"
    num_heads: int = 4
    use_short_conv: bool = False

    def __post_init__(self, **extra: Any) -> None:
        if self.head_dim is None and "expand_k" not in extra:
            self.head_dim = max(1, self.hidden_size // (2 * self.num_heads))  # keys of half the model's width
        super().__post_init__(**extra)


CONFIG_CLASSES: tuple[type[DeltaRuleConfig], ...] = (
    DeltaRuleConfig,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    KDAConfig,
    EFLAConfig,
    GatedDeltaProductConfig,
    CombaConfig,
    PrecondKDAConfig,
    PrecondGatedDeltaNetConfig,
    GatedLinearAttentionConfig,
)
"""One class per model type."""


class _TakesRuntimeOptions(DeltaRulePreTrainedModel):
    """Accepts runtime options in the constructor; transformers' heads accept only a configuration."""

    def __init__(self, config: DeltaRuleConfig, **runtime: Any) -> None:
        super().__init__(config)
        tell_of_row_head(self)
        self.set_runtime(**runtime)


class DeltaRuleForSequenceClassification(
    _TakesRuntimeOptions, GenericForSequenceClassification, DeltaRulePreTrainedModel
):
    """The decoder with a head that classifies a sequence by its last token."""


class DeltaRuleForTokenClassification(_TakesRuntimeOptions, GenericForTokenClassification, DeltaRulePreTrainedModel):
    """The decoder with a head that classifies every token."""


class DeltaRuleForQuestionAnswering(_TakesRuntimeOptions, GenericForQuestionAnswering, DeltaRulePreTrainedModel):
    """The decoder with a head that finds the start and the end of an answer."""

    # The generic head expects the embedding under another name than fla-hub's.
    get_input_embeddings = DeltaRulePreTrainedModel.get_input_embeddings
    set_input_embeddings = DeltaRulePreTrainedModel.set_input_embeddings


_BASES: dict[str, tuple[type[Any], ...]] = {
    "Model": (DeltaRuleModel,),
    "ForCausalLM": (DeltaRuleForCausalLM, GenerationMixin),  # transformers' own tests expect the mixin among the bases
    "ForSequenceClassification": (DeltaRuleForSequenceClassification,),
    "ForTokenClassification": (DeltaRuleForTokenClassification,),
    "ForQuestionAnswering": (DeltaRuleForQuestionAnswering,),
}
"""Bases of a model class by the end of its name."""

for _config in CONFIG_CLASSES[1:]:
    _title = str(_config.__doc__).partition(" (")[0]
    for _head, (_, _words) in HEADS.items():
        _members = {"__doc__": f"{_title}, a {_words}.", "__module__": __name__, "config_class": _config}
        _name = class_name(_config.__name__, _head)
        globals()[_name] = type(_name, _BASES[_head], _members)

__all__ = [  # noqa: PLE0604
    "DeltaRuleForQuestionAnswering",
    "DeltaRuleForSequenceClassification",
    "DeltaRuleForTokenClassification",
    *(config.__name__ for config in CONFIG_CLASSES[1:]),
    *(class_name(config.__name__, head) for config in CONFIG_CLASSES[1:] for head in HEADS),
]


def model_types() -> list[str]:
    """The `model_type` of every configuration of this package."""
    return [config.model_type for config in CONFIG_CLASSES]


def config_class_of(model_type: str | None, path: Path) -> type[DeltaRuleConfig]:
    """Our configuration class for the `model_type` found in the checkpoint at `path`; ValueError if it is not ours."""
    classes = {config.model_type: config for config in CONFIG_CLASSES}
    if model_type not in classes:
        raise ValueError(f"model type {model_type!r} in {path} is none of {', '.join(classes)}")
    return classes[model_type]


def model_class_of(config: type[DeltaRuleConfig], head: str) -> type[Any]:
    """The model class of a configuration class, with one of `deltazoo.models.config_keys.HEADS`."""
    return globals()[class_name(config.__name__, head)]


def register_auto_classes(override: bool = False) -> None:
    """Register our model types with the Auto classes.

    A `model_type` that another library has registered stays with that library, with a warning. Its checkpoints then
    load through our classes by name, `deltazoo.models.DeltaNetForCausalLM.from_pretrained(...)`.

    Args:
        override: replace the other library's classes.
    """
    # Types that `import deltazoo` has announced (deltazoo._auto_registration) would otherwise count as taken.
    getattr(CONFIG_MAPPING._extra_content, "announced", set()).difference_update(model_types())
    for config in CONFIG_CLASSES:
        for head in HEADS:
            auto_class = getattr(transformers, auto_class_name(head))
            auto_class.register(config, model_class_of(config, head), exist_ok=True)
            if names := getattr(config, "parameter_names", {}):
                # Renamings by model type would also act on another library's class, so they stand under the class's
                # name.
                renamings: list[WeightConverter | WeightRenaming] = [WeightRenaming(*pair) for pair in names.items()]
                register_checkpoint_conversion_mapping(class_name(config.__name__, head), renamings, overwrite=True)
        # get() of this mapping does not see what it loads lazily.
        owner = CONFIG_MAPPING[config.model_type] if config.model_type in CONFIG_MAPPING else None  # noqa: SIM401
        if owner is None or override:
            AutoConfig.register(config.model_type, config, exist_ok=override)
        elif owner is not config:
            warnings.warn(
                f"model type {config.model_type!r} is taken by {owner.__module__}.{owner.__name__}; Auto classes keep "
                f"using that. Load with deltazoo.models.{class_name(config.__name__, 'ForCausalLM')}, or call "
                "deltazoo.models.register_auto_classes(override=True)",
                stacklevel=2,
            )


def export_remote_code(path: str | Path) -> None:
    """Make a saved checkpoint load with `trust_remote_code=True` in a process that does not import deltazoo.

    It writes `configuration_deltazoo.py` and `modeling_deltazoo.py` into the folder and names them in `config.json`.
    If the model's rule does not come with deltazoo, the file that registers it is copied as well.

    Args:
        path: a folder that `save_pretrained` of one of our models has written.

    Raises:
        FileNotFoundError: the folder has no `config.json`.
        ValueError: the model is not ours; its rule is not loaded, or not in a file of its own.
    """
    path = Path(path)
    written = path / "config.json"
    values = json.loads(written.read_text(encoding="utf-8"))
    config_class = config_class_of(values.get("model_type"), path)
    config = config_class.__name__
    values["auto_map"] = auto_map(config)
    write_remote_code(path, config, source_of_rule(config_class.from_dict(dict(values)).mixer))
    written.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
