"""What docs/diagnosis.md says about the diverging run is in its committed result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from script_modules import ROOT, load_script

from deltazoo import spec

PAGE = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")


def test_the_page_quotes_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "_REGISTRY", dict(spec._REGISTRY))  # the script registers a rule
    script = load_script("diagnose_diverging_run")

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
