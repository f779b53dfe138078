"""docs/architecture.md lists every folder of the package, and the names that it gives are in their files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "deltazoo"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_folder_is_listed_and_all_that_is_listed_exists() -> None:
    folders = {f"{path.parent.relative_to(PACKAGE).as_posix()}/" for path in PACKAGE.glob("*/**/__init__.py")}
    assert folders == set(re.findall(r"^\| `((?:\w+/)+)` \|", PAGE, re.MULTILINE))
    way = [f"ops/{path}" for path in re.findall(r"^\| `((?:\w+/)*\w+\.py)` \|", PAGE, re.MULTILINE)]
    named = {*way, *re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE.partition("## From delta_rule")[0])}
    assert len(way) == 11 and not [path for path in named if not (PACKAGE / path).exists()]


def test_names_are_in_their_files() -> None:
    found = re.findall(r"`(\w+)`\s+in\s+`((?:\w+/)+\w+\.py)`", PAGE)
    assert len(found) > 15
    for name, path in found:
        text = (PACKAGE / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(?:def|class) {name}\b|^{name}\b", text, re.MULTILINE), (name, path)
