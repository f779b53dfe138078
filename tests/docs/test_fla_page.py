"""docs/coming_from_fla.md shows the committed results, and names every function there is."""

from __future__ import annotations

from script_modules import load_script

from deltazoo.compat import fla

render = load_script("render_fla_layers")
TEXT = render.PAGE.read_text(encoding="utf-8")


def test_the_page_shows_the_committed_results() -> None:
    assert render.page(TEXT) == TEXT, "run scripts/render_fla_layers.py"


def test_the_page_names_every_function() -> None:
    assert not [name for name in fla.__all__ if f"`{name}`" not in TEXT]
