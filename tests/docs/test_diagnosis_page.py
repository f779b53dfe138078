"""What docs/diagnosis.md says about the diverging run is in its committed result."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from deltazoo import spec

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "diagnose_diverging_run.py"
PAGE = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")


def test_the_page_quotes_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "_REGISTRY", dict(spec._REGISTRY))  # the script registers a rule
    specification = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert specification is not None and specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, SCRIPT.stem, script)
    specification.loader.exec_module(script)

    bounded, unbounded = json.loads(script.RESULT.read_text(encoding="utf-8"))["runs"]
    said = " ".join(PAGE.replace("\n> ", " ").split())
    assert None not in bounded["losses"] and not any(bounded["warnings"])
    assert f"until it is NaN, at step {unbounded['losses'].index(None) + 1}:" in said
    assert unbounded["warnings"][0][0] in said
    assert f"at step {unbounded['last_finite_step']}, the last with finite states" in said
    assert f"{unbounded['summaries'][25]['state_norm_max']:.0e}".replace("+", "") == "1e14" and "1e14" in said
    heads = unbounded["last_finite"]
    assert sum(head["gain_max"] > 2 for head in heads) > len(heads) / 2
    assert sum(head["chunk_norm"] > 2 for head in heads) == 2
    for drawn in script.draw(script.RESULT, tmp_path):
        assert drawn.stat().st_size > 10_000 and (script.IMAGES / drawn.name).exists()
