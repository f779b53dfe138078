"""Two Python files in a checkpoint, with which it loads without `import deltazoo`.

`AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)` imports them; they import the installed package, or
say how to install it. They hold no model code, so a checkpoint never carries an outdated copy of it. A rule that does
not come with the package is copied beside them. Their classes are subclasses of ours because transformers marks the
classes in such files as custom code.
"""

import json
import shutil
from pathlib import Path

from deltazoo.models.auto_map import CONFIGURATION_FILE, HEADS, MODELING_FILE, auto_map, class_name
from deltazoo.models.hub_configs import config_class_of
from deltazoo.models.outside_rules import source_of_rule

__all__ = ["INSTALL", "export_remote_code", "write_remote_code"]

INSTALL = "pip install ."
"""The command that installs the package from a checkout; it is on no package index."""

_HEADER = '''"""Written by deltazoo: the model's classes, imported from the installed package."""
'''
# In a try block: for an import outside one, transformers recommends `pip install` of the module's name.
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

    Writes `configuration_deltazoo.py` and `modeling_deltazoo.py` into the folder and names them in its `config.json`.
    If the model's rule does not come with deltazoo, the file that registers it is copied as well.

    Args:
        path: a folder that `save_pretrained` of one of our models has written.

    Raises:
        ValueError: the folder has no `config.json`, or one of a model that is not ours; the model's rule is not loaded,
            or not in a file of its own.
    """
    path = Path(path)
    written = path / "config.json"
    if not written.is_file():
        raise ValueError(f"{path} holds no config.json: save the model there first")
    values = json.loads(written.read_text(encoding="utf-8"))
    config_class = config_class_of(values.get("model_type"), path)
    config = config_class.__name__
    values["auto_map"] = auto_map(config)
    write_remote_code(path, config, source_of_rule(config_class.from_dict(dict(values)).mixer))
    written.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_remote_code(folder: Path, config: str, rule: Path | None = None) -> None:
    """Write the two files.

    Args:
        folder: of the checkpoint.
        config: name of the configuration class.
        rule: the file that registers the rule, copied beside them; None: it comes with deltazoo.
    """
    classes = [class_name(config, head) for head in HEADS]
    if rule is not None and rule.resolve() != (folder / rule.name).resolve():
        shutil.copyfile(rule, folder / rule.name)
    source = _configuration_source(config, None if rule is None else rule.stem)
    (folder / f"{CONFIGURATION_FILE}.py").write_text(source, encoding="utf-8")
    (folder / f"{MODELING_FILE}.py").write_text(_modeling_source(config, classes), encoding="utf-8")


def _configuration_source(config: str, rule: str | None) -> str:
    # transformers downloads the files that it finds in relative imports. Importing a rule registers it, which works
    # once per name.
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
