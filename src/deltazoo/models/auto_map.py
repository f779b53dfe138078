"""The entry `auto_map` of a config.json: the classes that transformers imports from the checkpoint's own Python files.

`remote_code` writes the files themselves.
"""

from typing import Any

__all__ = ["HEADS", "AutoMapConfig", "auto_class_name", "auto_map", "class_name", "has_remote_code"]

CONFIGURATION_FILE, MODELING_FILE = "configuration_deltazoo", "modeling_deltazoo"
"""The files' names, without `.py`."""
HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""The ends of the names of a model type's classes, as transformers names them."""


class AutoMapConfig:
    """The attribute `auto_map` of our configurations, empty unless the checkpoint has the two files.

    TRL reads it from every model whose class is not one of transformers' own.
    """

    @property
    def auto_map(self) -> dict[str, str]:
        """The classes in a checkpoint's own files, by the name of the Auto class."""
        return self.__dict__.setdefault("auto_map", {})

    @auto_map.setter
    def auto_map(self, classes: dict[str, str]) -> None:
        self.__dict__["auto_map"] = classes

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain values, without an empty `auto_map`."""
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
