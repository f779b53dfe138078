"""docs/coming_from_fla.md shows the committed results, and names every function there is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from deltazoo.interop import fla

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("render_fla_layers", ROOT / "scripts" / "render_fla_layers.py")
assert SPEC is not None and SPEC.loader is not None
render = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(render)
TEXT = render.PAGE.read_text(encoding="utf-8")


def test_the_page_shows_the_committed_results() -> None:
    assert render.page(TEXT) == TEXT, "run scripts/render_fla_layers.py"


def test_the_page_names_every_function() -> None:
    assert not [name for name in fla.__all__ if f"`{name}`" not in TEXT]
