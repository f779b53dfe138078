"""Checkpoints that load without `import deltazoo`: two short files that import the installed package and subclass.

`AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)` then works in a process that has never heard of
this package, and says how to install it where it is missing. The files hold no model code, so a checkpoint cannot
carry a stale copy of it; a rule that does not come with the package lies beside them. They are subclasses because
transformers marks the classes it finds in them as custom code, which ours must not become.
"""

import json
import shutil
from pathlib import Path

from deltazoo.models.auto_map import CONFIGURATION_FILE, HEADS, MODELING_FILE, auto_map, class_name
from deltazoo.models.hub_configs import config_class_of
from deltazoo.models.outside_rules import source_of_variant

__all__ = ["INSTALL", "export_remote_code", "write_remote_code"]

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
    classes = [class_name(config, head) for head in HEADS]
    if rule is not None and rule.resolve() != (folder / rule.name).resolve():
        shutil.copyfile(rule, folder / rule.name)
    source = _configuration_source(config, None if rule is None else rule.stem)
    (folder / f"{CONFIGURATION_FILE}.py").write_text(source, encoding="utf-8")
    (folder / f"{MODELING_FILE}.py").write_text(_modeling_source(config, classes), encoding="utf-8")


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
    imports = f"from .{CONFIGURATION_FILE} import {config}, deltazoo\n"
    return "\n\n".join([f"{_HEADER}\n{imports}", *subclasses])
