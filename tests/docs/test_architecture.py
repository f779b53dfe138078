"""docs/architecture.md shows the tree and the import rules as they are."""

from __future__ import annotations

import re
from pathlib import Path

from test_layering import MAY_IMPORT

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "deltazoo"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ABOVE = {"workbench", "__init__", "__main__"}
NAME = r"\w+(?:\.py|/)"


def drawn_tree() -> set[str]:
    """Paths in the package, from the picture."""
    (picture,) = re.findall(r"^```text\nsrc/deltazoo/\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    paths, parents = set(), [""]
    for line in picture.splitlines():
        entry = re.fullmatch(rf"((?:  )+)({NAME}(?:, {NAME})*)  +\S.*", line)
        assert entry, f"no entry of the tree: {line!r}"
        depth = len(entry[1]) // 2
        names = [parents[depth - 1] + name for name in entry[2].split(", ")]
        paths |= set(names)
        if names[0].endswith("/"):
            parents[depth:] = [names[0]]
    return paths


def test_everything_in_the_picture_exists() -> None:
    missing = [path for path in drawn_tree() if not (PACKAGE / path).exists()]
    assert not missing


def test_every_package_and_top_level_module_is_in_the_picture() -> None:
    packages = {f"{path.parent.relative_to(PACKAGE).as_posix()}/" for path in PACKAGE.rglob("*/__init__.py")}
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert not (packages | modules) - {"./"} - drawn_tree()


def test_every_file_named_in_the_text_exists() -> None:
    named = set(re.findall(r"`([\w/]+/(?:\w+\.py)?|\w+\.py)`", PAGE))
    homes = (PACKAGE, ROOT, PACKAGE / "ops")
    assert not [name for name in named if not any((home / name).exists() for home in homes)]


def test_the_import_table_is_the_enforced_one() -> None:
    shown: dict[str, set[str]] = {}
    for parts, allowed in re.findall(r"^\| (`.*?`) \| (nothing|everything|`[^|]*`) \|$", PAGE, re.MULTILINE):
        for part in re.findall(r"`(\w+)`", parts):
            shown[part] = {*MAY_IMPORT} - ABOVE if allowed == "everything" else set(re.findall(r"`(\w+)`", allowed))
    expected = {part: allowed - ABOVE - {part, "names"} for part, allowed in MAY_IMPORT.items()}
    assert {part: allowed - {part, "names"} for part, allowed in shown.items()} == expected
