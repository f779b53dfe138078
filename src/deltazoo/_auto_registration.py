"""Registration of our model types with transformers' Auto classes, without importing transformers.

Importing transformers' models takes seconds, and operators and layers do not need them. `import deltazoo` therefore
only announces the model types. `deltazoo.models` is imported when transformers first looks up one of them. The type of
a swapped model is registered on its own, since it brings the original model's classes with it.

The announcement needs transformers' table of model types, which may be imported after deltazoo. transformers has no
entry point for model types, and `AutoConfig.register` takes classes, so a finder in `sys.meta_path` waits for the
table's module; it removes itself when it has found it.
"""

import functools
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from deltazoo.names import SWAPPED_PREFIX, nearest
from deltazoo.spec import list_rules

MODEL_TYPES = (
    "delta_rule",
    "delta_net",
    "gated_deltanet",
    "kda",
    "efla",
    "gated_deltaproduct",
    "comba",
    "precond_kda",
    "precond_gated_deltanet",
    "gla",
)
_TABLE_MODULE = "transformers.models.auto.configuration_auto"


def announce_model_types() -> None:
    """Announce our model types to transformers' Auto classes, now or when they are imported; needs no transformers."""
    table_module = sys.modules.get(_TABLE_MODULE)
    if table_module is not None:
        _announce(table_module)
    elif not any(isinstance(finder, _TableFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TableFinder())


class _AnnouncedTypes(dict[str, Any]):
    """The entries that libraries add to transformers' table; ours are registered when they are looked up."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        # deltazoo.models registers the types, and removes them here, since an announced type counts as taken.
        self.announced = set() if "deltazoo.models" in sys.modules else set(MODEL_TYPES)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.announced or _original_type(key) is not None

    def __missing__(self, key: str) -> Any:
        if key in self.announced:
            importlib.import_module("deltazoo.models")
        elif original := _original_type(key):
            importlib.import_module("deltazoo.swap.models").register_swapped_classes(original)
        if not super().__contains__(key):
            raise KeyError(key)
        return self[key]


def _original_type(key: object) -> str | None:
    """The original model type if `key` is that of a swapped model."""
    if not isinstance(key, str) or not key.startswith(SWAPPED_PREFIX):
        return None
    original = key.removeprefix(SWAPPED_PREFIX)
    return original if original in importlib.import_module("deltazoo.swap").FAMILIES else None


class _TableFinder(MetaPathFinder):
    """A finder of transformers' table of model types, which announces ours when the table is loaded."""

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
    table._extra_content = _AnnouncedTypes(table._extra_content)
    _explain_rules(table_module)


def _explain_rules(table_module: ModuleType) -> None:
    """Let `AutoConfig.for_model` name the call that was meant by a misspelt type, or by a rule without a model type.

    Such names stay out of the table: with them, another library's checkpoint of such a type would load as ours.
    """
    for_model = table_module.AutoConfig.for_model.__func__

    @functools.wraps(for_model)
    def explaining(cls: Any, model_type: str, *args: Any, **kwargs: Any) -> Any:
        near = nearest(model_type, [*list_rules(), *MODEL_TYPES], cutoff=0.9)
        if near is not None and model_type not in table_module.CONFIG_MAPPING:
            meant = near if near in table_module.CONFIG_MAPPING else f"delta_rule', mixer='{near}"
            raise ValueError(f"{model_type!r} is no model type; use AutoConfig.for_model('{meant}', ...)")
        return for_model(cls, model_type, *args, **kwargs)

    table_module.AutoConfig.for_model = classmethod(explaining)
