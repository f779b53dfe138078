"""A rule that lies outside the package, in tests/broken_rules, loaded as a user would load it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deltazoo import spec
from deltazoo.cli.options import load_rule_file

RULES = Path(__file__).parent / "broken_rules"


@contextmanager
def forget_rules() -> Iterator[None]:
    """What is registered and loaded within is forgotten at the end, as if the process were a fresh one."""
    registered, modules = dict(spec._REGISTRY), set(sys.modules)
    try:
        yield
    finally:
        outside = {entry.module for name, entry in spec._REGISTRY.items() if name not in registered}
        spec._REGISTRY.clear()
        spec._REGISTRY.update(registered)
        for name in outside - modules:
            sys.modules.pop(name, None)


@pytest.fixture
def trapezoid() -> Iterator[str]:
    """Name of the registered outside rule; it is forgotten after the test."""
    with forget_rules():
        (name,) = load_rule_file(RULES / "trapezoid.py")
        yield name
