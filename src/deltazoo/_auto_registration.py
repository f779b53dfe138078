"""`import deltazoo` teaches transformers' Auto classes our model types without importing transformers.

Importing transformers' models takes seconds, which the operators and layers have no need of. So nothing is registered
at first: when transformers' table of model types comes into being, it is told that ours exist, and `deltazoo.models`
is imported when one of them is first looked up.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["MODEL_TYPES", "expect_model_types"]

MODEL_TYPES = ("delta_rule", "delta_net", "gated_deltanet", "kda", "efla")
_TABLE_MODULE = "transformers.models.auto.configuration_auto"


def expect_model_types() -> None:
    """Have the Auto classes know our model types as soon as they exist; safe to call without transformers."""
    table_module = sys.modules.get(_TABLE_MODULE)
    if table_module is not None:
        _announce(table_module)
    elif not any(isinstance(finder, _TableFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TableFinder())


class _ExpectedTypes(dict[str, Any]):
    """The entries that libraries add to transformers' table; our own are imported when asked for."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in MODEL_TYPES

    def __missing__(self, key: str) -> Any:
        if key not in MODEL_TYPES:
            raise KeyError(key)
        table = sys.modules[_TABLE_MODULE].CONFIG_MAPPING
        table._extra_content = dict(self)
        importlib.import_module("deltazoo.models")
        return table._extra_content[key]


class _TableFinder(MetaPathFinder):
    """Finds transformers' table of model types as Python would, and announces ours in it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TABLE_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_announce(module: ModuleType) -> None:
            load(module)
            _announce(module)

        spec.loader.exec_module = load_and_announce  # type: ignore[method-assign]
        return spec


def _announce(table_module: ModuleType) -> None:
    if "deltazoo.models" not in sys.modules:
        table = table_module.CONFIG_MAPPING
        table._extra_content = _ExpectedTypes(table._extra_content)
