"""`import deltazoo` teaches transformers' Auto classes our model types without importing transformers.

Importing transformers' models takes seconds, which the operators and layers have no need of. So nothing is registered
at first: when transformers' table of model types comes into being, it is told that ours exist, and `deltazoo.models`
is imported when one of them is first looked up. Types of swapped models are registered one by one, since each brings
the original model's classes with it.
"""

import functools
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from deltazoo.spec import list_variants

__all__ = ["MODEL_TYPES", "SWAPPED_PREFIX", "expect_model_types", "fulfil"]

MODEL_TYPES = ("delta_rule", "delta_net", "gated_deltanet", "kda", "efla")
SWAPPED_PREFIX = "deltazoo_"
"""Models with swapped attention (`deltazoo.swap.FAMILIES`) have the original model type after it."""
_TABLE_MODULE = "transformers.models.auto.configuration_auto"


def expect_model_types() -> None:
    """Have the Auto classes know our model types as soon as they exist; safe to call without transformers."""
    table_module = sys.modules.get(_TABLE_MODULE)
    if table_module is not None:
        _announce(table_module)
    elif not any(isinstance(finder, _TableFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TableFinder())


class _ExpectedTypes(dict[str, Any]):
    """The entries that libraries add to transformers' table; ours are registered when asked for."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.expected = set(MODEL_TYPES)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.expected or _original_type(key) is not None

    def __missing__(self, key: str) -> Any:
        if key in self.expected:
            importlib.import_module("deltazoo.models")
        elif original := _original_type(key):
            importlib.import_module("deltazoo.swap.swapped_models").register_swapped_classes(original)
        if not super().__contains__(key):
            raise KeyError(key)
        return self[key]


def _original_type(key: object) -> str | None:
    """The original model type if `key` is that of a swapped model."""
    if not isinstance(key, str) or not key.startswith(SWAPPED_PREFIX):
        return None
    original = key.removeprefix(SWAPPED_PREFIX)
    return original if original in importlib.import_module("deltazoo.swap").FAMILIES else None


def fulfil(model_types: Iterable[str]) -> None:
    """Expect these types no longer: from here on transformers' table says what was registered under their names."""
    table_module = sys.modules.get(_TABLE_MODULE)
    entries = None if table_module is None else table_module.CONFIG_MAPPING._extra_content
    if isinstance(entries, _ExpectedTypes):
        entries.expected.difference_update(model_types)


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
    table = table_module.CONFIG_MAPPING
    table._extra_content = _ExpectedTypes(table._extra_content)
    if "deltazoo.models" in sys.modules:
        fulfil(MODEL_TYPES)
    _explain_variants(table_module)


def _explain_variants(table_module: ModuleType) -> None:
    """Have `AutoConfig.for_model` say what to use for a variant that is no model type.

    Such names stay out of the table: a checkpoint of others that has one for its type would be taken for ours.
    """
    for_model = table_module.AutoConfig.for_model.__func__

    @functools.wraps(for_model)
    def explaining(cls: Any, model_type: str, *args: Any, **kwargs: Any) -> Any:
        if model_type in list_variants() and model_type not in table_module.CONFIG_MAPPING:
            raise ValueError(
                f"{model_type!r} is a variant of deltazoo without a model type of its own: use "
                f"AutoConfig.for_model('delta_rule', mixer={model_type!r}, ...)"
            )
        return for_model(cls, model_type, *args, **kwargs)

    table_module.AutoConfig.for_model = classmethod(explaining)
