"""docs/coming_from_fla.md names every function there is."""

from __future__ import annotations

from pathlib import Path

from deltazoo.compat import fla

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "coming_from_fla.md").read_text(encoding="utf-8")


def test_the_page_names_every_function() -> None:
    assert not [name for name in fla.__all__ if f"`{name}`" not in TEXT]
