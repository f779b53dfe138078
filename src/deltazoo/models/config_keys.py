"""Keys of a config.json that do not describe the computation, for our own configurations and those of swapped models.

`auto_map` names the classes that transformers imports from the checkpoint's own Python files, which `saving` writes.
Runtime options say how a model runs (`deltazoo.runtime.RuntimeOptions`): a saved configuration does not contain them,
and a configuration refuses them from a caller.
"""

import sys
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from deltazoo.runtime import FORMER_OPTIONS, RUNTIME_OPTIONS

CONFIGURATION_FILE, MODELING_FILE = "configuration_deltazoo", "modeling_deltazoo"
"""The names, without `.py`, of a checkpoint's own files."""
HEADS: Mapping[str, tuple[str, str]] = {
    "Model": ("feature-extraction", "language model without a head"),
    "ForCausalLM": ("text-generation", "causal language model"),
    "ForSequenceClassification": ("text-classification", "sequence classification model"),
    "ForTokenClassification": ("token-classification", "token classification model"),
    "ForQuestionAnswering": ("question-answering", "question answering model"),
}
"""The ends of the names of a model type's classes, as transformers names them: the Hub's task, and the model in words.
"""
_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The large projections that linear and softmax layers have in common."""


class SharedConfig:
    """Additions of all our configurations to those of transformers."""

    original_model_type: ClassVar[str | None] = None
    """The model type before some of its layers were swapped."""

    @property
    def auto_map(self) -> dict[str, str]:
        """The classes in a checkpoint's own Python files, by the name of the Auto class; empty without such files.

        TRL reads this attribute of every model whose class does not belong to transformers.
        """
        return self.__dict__.setdefault("auto_map", {})

    @auto_map.setter
    def auto_map(self, classes: dict[str, str]) -> None:
        self.__dict__["auto_map"] = classes

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain values, without an empty `auto_map`; PEFT learns which modules LoRA adapts."""
        # PEFT calls this just before it looks up default targets, and may be imported later than deltazoo.
        constants = sys.modules.get("peft.utils.constants")
        if constants is not None:
            known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
            targets = [*_LORA_TARGETS, *known.get(self.original_model_type, ())]
            known.setdefault(self.model_type, list(dict.fromkeys(targets)))  # type: ignore[attr-defined]
        values = super().to_dict()  # type: ignore[misc]
        if not self.auto_map:
            values.pop("auto_map", None)
        return values


def class_name(config: str, head: str) -> str:
    """Name of the model class for a configuration class and one of `HEADS`."""
    return config.removesuffix("Config") + head


def auto_class_name(head: str) -> str:
    """Name of transformers' Auto class for one of `HEADS`."""
    return f"AutoModel{head.removeprefix('Model')}"


def auto_map(config: str) -> dict[str, str]:
    """The entry `auto_map` that names the classes in the two files."""
    return {"AutoConfig": f"{CONFIGURATION_FILE}.{config}"} | {
        auto_class_name(head): f"{MODELING_FILE}.{class_name(config, head)}" for head in HEADS
    }


def has_remote_code(config: object) -> bool:
    """Whether a configuration comes from a checkpoint with the two files."""
    found = getattr(config, "auto_map", None) or {}
    return str(found.get("AutoConfig", "")).rpartition("--")[2].startswith(f"{CONFIGURATION_FILE}.")


def without_runtime_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` without the runtime options that older versions wrote into it; warns if it had any."""
    found = [key for key in (*RUNTIME_OPTIONS, *FORMER_OPTIONS) if key in values]
    if found:
        listed = ", ".join(f"{key}={values[key]!r}" for key in found)
        kept = (
            "" if set(found) <= set(FORMER_OPTIONS) else "; pass them to from_pretrained or model.set_runtime instead"
        )
        gone = "".join(f". {FORMER_OPTIONS[key]}" for key in found if key in FORMER_OPTIONS)
        warnings.warn(
            f"the configuration holds {listed}, which say how a model runs, not what it is. They are ignored, and left "
            f"out when the model is saved again{kept}{gone}",
            stacklevel=2,
        )
    return {key: value for key, value in values.items() if key not in found}


def not_a_key(option: str) -> str:
    """The message for a caller who gives a runtime option to a configuration."""
    return (
        f"{option} says how a model runs, not what it is, and is no key of its configuration: pass it to "
        f"from_pretrained or to the model's constructor, or call model.set_runtime({option}=...)"
    )
