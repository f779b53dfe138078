"""Registration with transformers' Auto classes: `AutoModelForCausalLM.from_pretrained` after `import deltazoo`."""

import json
import warnings
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deltazoo._auto_registration import fulfil
from deltazoo.interop.fla_checkpoints import modernize_state_dict
from deltazoo.models import configuration, modeling, named

__all__ = ["config_class_of", "load_fla_checkpoint", "model_types", "register_auto_classes"]

_AUTO_CLASSES = {
    "Model": AutoModel,
    "ForCausalLM": AutoModelForCausalLM,
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForQuestionAnswering": AutoModelForQuestionAnswering,
}
_CONFIGS: tuple[type[PreTrainedConfig], ...] = (
    configuration.DeltaRuleConfig,
    configuration.DeltaNetConfig,
    configuration.GatedDeltaNetConfig,
    configuration.KDAConfig,
    configuration.EFLAConfig,
)


def model_types() -> list[str]:
    """The `model_type` of every configuration of this package."""
    return [config.model_type for config in _CONFIGS]


def register_auto_classes(override: bool = False) -> None:
    """Make the Auto classes know our model types.

    A `model_type` that another library has registered is left to it, with a warning: its checkpoints then load through
    our classes by name, `deltazoo.models.DeltaNetForCausalLM.from_pretrained(...)`.

    Args:
        override: take such names over.
    """
    fulfil(model_types())
    for config in _CONFIGS:
        prefix = config.__name__.removesuffix("Config")
        for suffix, auto_class in _AUTO_CLASSES.items():
            auto_class.register(config, _model_class(prefix + suffix), exist_ok=True)
        # The mapping is a dict whose get() does not see what it loads lazily.
        owner = CONFIG_MAPPING[config.model_type] if config.model_type in CONFIG_MAPPING else None  # noqa: SIM401
        if owner is None or override:
            AutoConfig.register(config.model_type, config, exist_ok=override)
        elif owner is not config:
            warnings.warn(
                f"model type {config.model_type!r} is taken by {owner.__module__}.{owner.__name__}; Auto classes keep "
                f"using that. Load with deltazoo.models.{prefix}ForCausalLM, or call "
                "deltazoo.models.register_auto_classes(override=True)",
                stacklevel=2,
            )


def config_class_of(model_type: str | None, path: Path) -> type[PreTrainedConfig]:
    """Our configuration class for the `model_type` found in the checkpoint at `path`; ValueError if it is not ours."""
    configs = {config.model_type: config for config in _CONFIGS}
    if model_type not in configs:
        raise ValueError(f"model type {model_type!r} in {path} is none of {', '.join(configs)}")
    return configs[model_type]


def load_fla_checkpoint(path: str | Path, **kwargs: Any) -> modeling.DeltaRuleForCausalLM:
    """A causal language model from an fla-hub checkpoint of any age, even while fla's classes own the Auto classes.

    Checkpoints in today's names need no more than `from_pretrained`. What `save_pretrained` writes carries those names.

    Args:
        path: a directory with `config.json` and safetensors files.
        kwargs: for `from_pretrained`, such as `dtype`.

    Raises:
        ValueError: the directory holds no safetensors files, or a model type that is not ours.
    """
    path = Path(path)
    values = json.loads((path / "config.json").read_text())
    config = config_class_of(values.get("model_type"), path).from_dict(values)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no safetensors files in {path}; pickled weights are not read")
    state = {name: x for file in files for name, x in load_file(file).items()}
    model_class = _model_class(type(config).__name__.removesuffix("Config") + "ForCausalLM")
    return model_class.from_pretrained(None, config=config, state_dict=modernize_state_dict(state), **kwargs)


def _model_class(name: str) -> type[Any]:
    return getattr(modeling, name, None) or getattr(named, name)
