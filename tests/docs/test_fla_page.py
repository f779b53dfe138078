"""docs/other_libraries.md names every function there is."""

from __future__ import annotations

from pathlib import Path

from deltazoo.compat import fla

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "other_libraries.md").read_text(encoding="utf-8")


def test_the_page_names_every_function() -> None:
    assert not [name for name in fla.__all__ if f"`{name}`" not in TEXT]
