"""scripts/bench_native_training.py measures every preset in every way, and writes where and with what."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from native_runs import INSTALLED
from script_modules import load_script


def test_small_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("bench_native_training")
    monkeypatch.setattr(script, "WARM_UP", 1)
    monkeypatch.setattr(script.Vocabulary, "__len__", lambda self: 64)
    out = tmp_path / "result.json"
    presets = [preset for preset in script.PRESETS if preset.removesuffix("_340m") in INSTALLED]
    arguments = ["--device", "cpu", "--small", "--steps", "1", "--fla", "--out", str(out), "--presets", *presets]
    monkeypatch.setattr(sys, "argv", ["bench_native_training.py", *arguments])
    assert script.main() == 0
    content = json.loads(out.read_text(encoding="utf-8"))
    assert content["run"]["commit"] and content["run"]["transformers"]
    assert [(row["preset"], row["way"]) for row in content["rows"]] == [
        (preset, way) for preset in presets for way in script.WAYS
    ]
    for row in content["rows"]:
        assert row["low"] <= row["tokens_per_s"] <= row["high"]
        assert row["losses"][0] == pytest.approx(math.log(64), rel=0.1) and row["losses"][1] < row["losses"][0]
