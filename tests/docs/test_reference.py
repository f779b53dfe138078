"""The reference pages name things that exist; every public name, rule and page is listed; versions agree."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import deltazoo
from deltazoo.compat import fla

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_names_what_exists_and_every_public_name() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    names = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    found = {name: pkgutil.resolve_name(name) for name in names}
    assert not [name for name, value in found.items() if not (value.__doc__ or type(value).__doc__)]
    assert {f"deltazoo.{name}" for name in deltazoo.__all__} <= set(names)


def test_the_page_of_other_libraries_names_every_function_of_fla() -> None:
    text = (ROOT / "docs" / "other_libraries.md").read_text(encoding="utf-8")
    assert not [name for name in fla.__all__ if f"`{name}`" not in text]


def test_every_page_is_in_the_navigation_and_names_this_version() -> None:
    order = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"README.md"} == {path for path in re.findall(r"\]\((\S+)\)", order) if not path.startswith("..")}
    for page in (ROOT / "README.md", ROOT / "docs" / "architecture.md"):
        wheels = re.findall(r"deltazoo-([\d.]+)-py3", page.read_text(encoding="utf-8"))
        assert set(wheels) == {deltazoo.__version__}


def test_every_rule_is_in_the_table_and_counted() -> None:
    table = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8").split("### All of them")[1].split("\n#")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == deltazoo.list_rules()
    counts = re.findall(r"(?:has|of the) (\d+)[ .]", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert {int(count) for count in counts} == {len(deltazoo.list_rules())}
