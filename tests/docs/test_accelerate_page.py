"""docs/accelerate.md shows the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from script_modules import load_script

render_accelerate = load_script("render_accelerate")


def test_the_page_shows_the_committed_results() -> None:
    assert render_accelerate.PAGE.read_text(encoding="utf-8") == render_accelerate.page()


def row(model: str, phase: str, times: float, **others: Any) -> dict[str, Any]:
    speeds = [{"tokens_per_s": x, "low": x, "high": x, "peak_mib": 1.0} for x in (10.0, 10.0 * times)]
    sizes = {"batch": 1, "tokens": 4096, "parameters": 10**9, "dtype": "bfloat16", "fused_kernels": None}
    return {"model": model, "phase": phase, **sizes, "before": speeds[0], "after": speeds[1], **others}


def test_captured_decoding_and_why_a_model_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = "generate captures its step in a CUDA graph (the last call: captured)"
    sparse = "generate runs the ordinary loop: sparse layers (the last call: the ordinary loop: sparse layers (why))"
    rows = [row("kimi_linear", phase, 2) for phase in ("prompt", "training", "step")]
    rows += [row("kimi_linear", "generate", 5, decoding=captured)]
    rows += [row("qwen4_exp_text", "generate", 1, decoding=sparse, tokens=256)]
    rows += [row("qwen4_exp_text", "loop", 1, after={"error": "refused: a captured step cannot work"}, tokens=256)]
    packages = ("torch", "triton", "transformers")
    run = {"gpu": "NVIDIA H200", "date": "2026-01-01", "commit": "0" * 40, **dict.fromkeys(packages, "1")}
    (tmp_path / "accelerate_h200.json").write_text(json.dumps({"run": run, "rows": rows}))
    monkeypatch.setattr(render_accelerate, "RESULTS", tmp_path)
    page = render_accelerate.page()
    text = " ".join(page.split())
    assert "`generate` decodes 5.0 to 5.0 times as fast where its step can be captured." in text
    assert "The step of qwen4_exp_text is not captured: sparse layers (why)." in page
    assert "1 x 4,096 tokens; qwen4_exp_text 1 x 256." in page
    assert "| qwen4_exp_text | loop | 1,000 M | 10 (10 to 10) | refused |" in page
    missing = "bailing_hybrid, glm5_next, lara_mini, olmo_hybrid, qwen3_5, qwen3_5_moe, qwen3_next"
    assert f"Not measured: every phase of {missing}." in text
    assert "10 (10 to 10) | 20 (20 to 20) | 2.00 |" in page and "1.00, overlap |" in page
    assert "16 experts" in page and "| generate | `model.generate` of 64 tokens" in page
