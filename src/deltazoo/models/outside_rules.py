"""Rules that do not come with deltazoo: the module that registers one, and the file that it is in."""

import sys
from pathlib import Path

from deltazoo.spec import get_rule, list_rules, registering_module

_REMOTE_CODE = "transformers_modules"
"""The package in which transformers imports a checkpoint's own code."""


def module_of_rule(rule: str, recorded: str | None, *, remote_code: bool = True) -> str | None:
    """The module that registers a rule, which a configuration records beside the rule's name.

    Args:
        recorded: the module that a config.json names; not imported.
        remote_code: whether such a model can be saved with `remote_code=True`; only for the message.

    Returns:
        The module's name; None: the rule comes with deltazoo.

    Raises:
        ValueError: no such rule; the message names the missing module, if it is recorded, and how to supply it.
    """
    if rule not in list_rules() and recorded is not None:
        brought = (
            "; a model saved with remote_code=True brings it along, for trust_remote_code=True in a process that has "
            "not imported deltazoo"
        )
        raise ValueError(
            f"this model's layers are of the rule {rule!r}, which does not come with deltazoo: the module "
            f"{recorded!r} registers it. Import that module before loading the model, or on the command line give its "
            f"file with --load {recorded.rpartition('.')[2]}.py. It is not imported because the configuration names "
            f"it{brought if remote_code else ''}."
        )
    get_rule(rule)
    return _recorded_name(registering_module(rule))


def loaded_modules() -> set[str]:
    """The modules of rules that do not come with deltazoo, by the names that configurations record.

    Saved checkpoints with Python files of their own call this function by its present path.
    """
    names = {_recorded_name(registering_module(rule)) for rule in list_rules()}
    return {name for name in names if name is not None}


def _recorded_name(module: str | None) -> str | None:
    """The module's name without the package in which transformers imports a checkpoint's code."""
    if module is not None and module.partition(".")[0] == _REMOTE_CODE:
        return module.rpartition(".")[2]
    return module


def source_of_rule(rule: str) -> Path | None:
    """The file that registers a rule, to be saved beside a model; None: it comes with deltazoo.

    Raises:
        ValueError: it was registered outside any file, as in a notebook, or in a module of a package.
    """
    module = registering_module(rule)
    if module is None:
        return None
    path = getattr(sys.modules.get(module), "__file__", None)
    inside = module.partition(".")[0] != _REMOTE_CODE and "." in module
    if path is None or inside or module == "__main__":
        raise ValueError(
            f"rule {rule!r} was registered by {module!r}, and only a rule in a file of its own, imported as a "
            "top-level module, can be saved with the model: move it to one, or save without remote_code"
        )
    return Path(path)
