"""Public names of a package that are imported from their modules on first access."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_FORMER = {
    "DeltaRuleSpec": "RuleSpec",
    "MixerState": "LayerState",
    "get_variant": "get_rule",
    "list_variants": "list_rules",
    "register_variant": "register_rule",
}
"""Names of development versions, which rule files may hold."""


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]], subpackages: Sequence[str] = ()
) -> Callable[[str], Any]:
    """The `__getattr__` of a package, so that importing it imports no torch.

    Args:
        package: the package's `__name__`.
        modules: module of the package -> the public names that it defines.
        subpackages: subpackages that are attributes of the package without having been imported.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in subpackages:
            value: Any = importlib.import_module(f"{package}.{name}")
        elif name in module_of:
            value = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        elif name in _FORMER:  # an ImportError, whose message survives `from package import name`
            raise ImportError(f"{package}.{name} is {package}.{_FORMER[name]} now: write that")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # the next access does not call this function
        return value

    return __getattr__
