"""docs/accelerate.md shows the committed results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("render_accelerate", ROOT / "scripts" / "render_accelerate.py")
assert SPEC is not None and SPEC.loader is not None
render_accelerate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(render_accelerate)


def test_the_page_shows_the_committed_results() -> None:
    assert render_accelerate.PAGE.read_text(encoding="utf-8") == render_accelerate.page()
