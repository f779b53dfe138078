"""The reference pages name things that exist; every public name and every page is listed; versions agree."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

import deltazoo

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    name
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_reference_exists(name: str) -> None:
    assert pkgutil.resolve_name(name).__doc__ or pkgutil.resolve_name(name).__class__.__doc__


def test_every_public_name_has_a_place_in_the_reference() -> None:
    assert {f"deltazoo.{name}" for name in deltazoo.__all__} <= set(NAMES)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if f": {page}\n" not in navigation]


def test_the_pages_name_this_version() -> None:
    for page in (ROOT / "docs" / "install.md", ROOT / "CONTRIBUTING.md"):
        wheels = re.findall(r"deltazoo-([\d.]+)-py3", page.read_text(encoding="utf-8"))
        assert set(wheels) == {deltazoo.__version__}
