"""Build a dataclass from YAML; unknown and repeated keys raise."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import yaml

from deltazoo.names import unknown

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would silently take the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As YAML's own."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ValueError(f"the key {key.value!r} is given twice, again in line {key.start_mark.line + 1}")
                seen.add(key.value)
        return node


def parse_yaml(text: str) -> Any:
    """The content of a YAML document.

    Raises:
        ValueError: a key is repeated.
        yaml.YAMLError: it is no YAML.
    """
    return yaml.load(text, _Loader)


def from_mapping(cls: type[T], mapping: Any, where: str = "") -> T:
    """Build the dataclass ``cls`` from ``mapping``; nested dataclass fields are built from nested mappings.

    Args:
        cls: a dataclass.
        mapping: keys are field names. ``None`` counts as empty, as an empty YAML section does.
        where: dotted path of the section, for messages; empty at the top.

    Raises:
        ValueError: an unknown key (the nearest known one is named), missing keys (all are named), or a value of the
            wrong type.
    """
    missing = _missing_keys(cls, mapping, where)
    if missing:
        verb, pronoun = ("is", "it has") if len(missing) == 1 else ("are", "they have")
        raise ValueError(f"{', '.join(missing)} {verb} missing; {pronoun} no default")
    hints = typing.get_type_hints(cls)
    return cls(**{name: _convert(hints[name], value, _join(where, name)) for name, value in (mapping or {}).items()})


def _missing_keys(cls: Any, mapping: Any, where: str) -> list[str]:
    """The keys without default that are missing, also in nested sections; ValueError for unknown keys."""
    if mapping is None:
        mapping = {}
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{where or 'the configuration'} must be a mapping of keys to values, got {mapping!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in mapping:
        if key not in fields:
            raise ValueError(unknown("key", str(key), sorted(fields), within=f"{where}." if where else ""))
    hints = typing.get_type_hints(cls)
    missing = []
    for name, field in fields.items():
        hint, path = hints[name], _join(where, name)
        if name not in mapping:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                missing.append(path)
            continue
        options = typing.get_args(hint)
        if mapping[name] is None and type(None) in options:
            continue
        for section in filter(dataclasses.is_dataclass, (hint, *options)):
            missing += _missing_keys(section, mapping[name], path)
    return missing


def _join(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_mapping(hint, value, where)  # type: ignore[arg-type]
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in options:
            return None
        remaining = [option for option in options if option is not type(None)]
        return _convert(remaining[0], value, where)
    if origin is typing.Literal:
        if value not in options:
            raise ValueError(f"{where} must be one of {', '.join(map(repr, options))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or len(value) != len(options):
            raise ValueError(f"{where} must be a list of {len(options)} values, got {value!r}")
        return tuple(
            _convert(option, item, f"{where}[{i}]") for i, (option, item) in enumerate(zip(options, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be a mapping of keys to values, got {value!r}")
        return dict(value)
    return _scalar(hint, value, where)


def _scalar(hint: type, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-3 as a string; only 1.0e-3 is a number to it.
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{where} must be of type {hint.__name__}, got {value!r}")
