"""docs/architecture.md shows every folder of the package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "deltazoo"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def drawn_tree() -> set[str]:
    """Paths in the package, from the picture."""
    (picture,) = re.findall(r"^```text\nsrc/deltazoo/\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    paths, parents = set(), [""]
    for indent, names in re.findall(r"^((?:  )+)(\S+(?:, \S+)*)  ", picture, re.MULTILINE):
        depth = len(indent) // 2
        entries = [parents[depth - 1] + name for name in names.split(", ")]
        paths |= set(entries)
        parents[depth:] = [entries[0]]
    return paths


def test_every_folder_is_in_the_picture_and_all_in_it_exists() -> None:
    assert not {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")} - drawn_tree()
    named = drawn_tree() | set(re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE))
    assert not [path for path in named if not (PACKAGE / path).exists()]
