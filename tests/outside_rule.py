"""A rule that lies outside the package, in tests/rules, loaded as a user would load it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltazoo import spec
from deltazoo.rule_files import load_rule_file

RULES = Path(__file__).parent / "rules"


@pytest.fixture
def trapezoid(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of the registered outside variant; it is forgotten after the test."""
    monkeypatch.setattr(spec, "_REGISTRY", dict(spec._REGISTRY))
    (name,) = load_rule_file(RULES / "trapezoid.py")
    yield name
    del sys.modules["trapezoid"]
