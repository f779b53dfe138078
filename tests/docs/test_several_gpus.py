"""docs/several_gpus.md shows the committed results, and its blocks for two processes run in two processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from several_processes import run_in_processes
from tiny_models import tiny_model
from tiny_runs import run_python

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("render_several_gpus", ROOT / "scripts" / "render_several_gpus.py")
assert SPEC is not None and SPEC.loader is not None
render_several_gpus = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(render_several_gpus)


def test_the_page_shows_the_committed_results() -> None:
    assert render_several_gpus.PAGE.read_text(encoding="utf-8") == render_several_gpus.page()


def test_blocks_for_two_processes_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = render_several_gpus.PAGE.read_text(encoding="utf-8")
    blocks = [part.split("```python\n")[1].split("\n```")[0] for part in text.split("<!-- not run: needs two")[1:]]
    assert len(blocks) == 6
    tiny_model("hybrid_kda", vocab_size=258, num_heads=2).save_pretrained(tmp_path / "my_model")
    found = run_in_processes(2, run_python, "\n".join(blocks[:4]), tmp_path, "float(loss)")
    assert all(torch.isfinite(torch.tensor(found)))
    norm = "float(clip_grad_norm_(model.parameters(), 1.0))"
    assert max(run_in_processes(2, run_python, "\n".join(blocks[4:]), tmp_path, norm)) < 1 + 1e-3  # it was clipped
