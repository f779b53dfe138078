"""Checkpoints that load without `import deltazoo`: two short files that import the installed package and subclass.

`AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)` then works in a process that has never heard of
this package, and says how to install it where it is missing. The files hold no model code, so a checkpoint cannot
carry a stale copy of it; a rule that does not come with the package lies beside them. They are subclasses because
transformers marks the classes it finds in them as custom code, which ours must not become.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from deltazoo.models.outside_rules import source_of_variant

__all__ = ["INSTALL", "AutoMapConfig", "auto_map", "export_remote_code", "has_remote_code", "write_remote_code"]

_CONFIGURATION, _MODELING = "configuration_deltazoo", "modeling_deltazoo"
HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""What every model type has a class for, in the names of transformers."""

INSTALL = "pip install ."
"""What installs the package, in a checkout of it: no index of packages has it."""

_HEADER = '''"""Written by deltazoo, which holds the model; nothing here but its name."""
'''
# In a try block, because of an import outside one transformers says that `pip install` of its name will do.
_IMPORT = f"""
try:
    import deltazoo.models
except ModuleNotFoundError as error:
    if error.name != "deltazoo":
        raise
    message = "this model needs deltazoo, which is not on PyPI: run `{INSTALL}` in a checkout of it"
    raise ModuleNotFoundError(message, name="deltazoo") from None
"""


class AutoMapConfig:
    """A configuration that has `auto_map`, empty unless it comes from a checkpoint with the two files.

    Mixed into our configuration classes: TRL reads it of every model whose class is not one of transformers' own.
    """

    @property
    def auto_map(self) -> dict[str, str]:
        """The classes of a checkpoint's own files, by the name of the Auto class."""
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


def export_remote_code(path: str | Path) -> None:
    """Make a saved checkpoint load with `trust_remote_code=True` in a process that does not import deltazoo.

    Writes `configuration_deltazoo.py` and `modeling_deltazoo.py` into the folder and names them in its `config.json`. A
    rule that does not come with deltazoo lies beside them, a copy of the file that registers it.

    Args:
        path: a folder that `save_pretrained` of one of our models has written.

    Raises:
        ValueError: the folder holds no `config.json`, or that of a model which is not ours; a rule of others that is
            not loaded, or not in a file of its own.
    """
    from deltazoo.models.auto import config_class_of  # imports the models, which import this module

    path = Path(path)
    written = path / "config.json"
    if not written.is_file():
        raise ValueError(f"{path} holds no config.json: save the model there first")
    values = json.loads(written.read_text(encoding="utf-8"))
    config_class = config_class_of(values.get("model_type"), path)
    config = config_class.__name__
    values["auto_map"] = auto_map(config)
    write_remote_code(path, config, source_of_variant(config_class.from_dict(dict(values)).mixer))
    written.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_remote_code(folder: Path, config: str, rule: Path | None = None) -> None:
    """Write the two files.

    Args:
        folder: of the checkpoint.
        config: name of the configuration class.
        rule: the file that registers the variant, copied beside them; None: it comes with deltazoo.
    """
    classes = [_class_name(config, head) for head in HEADS]
    if rule is not None and rule.resolve() != (folder / rule.name).resolve():
        shutil.copyfile(rule, folder / rule.name)
    source = _configuration_source(config, None if rule is None else rule.stem)
    (folder / f"{_CONFIGURATION}.py").write_text(source, encoding="utf-8")
    (folder / f"{_MODELING}.py").write_text(_modeling_source(config, classes), encoding="utf-8")


def auto_map(config: str) -> dict[str, str]:
    """What `config.json` must say for transformers to find the classes in the two files."""
    return {"AutoConfig": f"{_CONFIGURATION}.{config}"} | {
        f"AutoModel{head.removeprefix('Model')}": f"{_MODELING}.{_class_name(config, head)}" for head in HEADS
    }


def has_remote_code(config: object) -> bool:
    """Whether a configuration comes from a checkpoint with the two files."""
    found = getattr(config, "auto_map", None) or {}
    return str(found.get("AutoConfig", "")).rpartition("--")[2].startswith(f"{_CONFIGURATION}.")


def _class_name(config: str, head: str) -> str:
    return config.removesuffix("Config") + head


def _configuration_source(config: str, rule: str | None) -> str:
    # transformers finds the file to fetch by this line. Importing a rule registers it, and a name is taken once.
    imported = (
        ""
        if rule is None
        else f"""
if {rule!r} not in deltazoo.models.outside_rules.loaded_modules():
    from .{rule} import __name__ as _rule
"""
    )
    return f"""{_HEADER}{_IMPORT}{imported}

class {config}(deltazoo.models.{config}):
    pass
"""


def _modeling_source(config: str, classes: list[str]) -> str:
    subclasses = (f"class {name}(deltazoo.models.{name}):\n    config_class = {config}\n" for name in classes)
    imports = f"from .{_CONFIGURATION} import {config}, deltazoo\n"
    return "\n\n".join([f"{_HEADER}\n{imports}", *subclasses])
