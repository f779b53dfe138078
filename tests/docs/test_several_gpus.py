"""The blocks of docs/training.md for two processes run in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from several_processes import run_in_processes
from tiny_models import tiny_model
from tiny_runs import for_the_installed_version, run_python

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def test_blocks_for_two_processes_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = for_the_installed_version(PAGE.read_text(encoding="utf-8"))
    blocks = [part.split("```python\n")[1].split("\n```")[0] for part in text.split("<!-- not run: needs two")[1:]]
    assert len(blocks) == 4
    tiny_model("hybrid_kda", vocab_size=258, num_heads=2).save_pretrained(tmp_path / "my_model")
    found = run_in_processes(2, run_python, "\n".join(blocks), tmp_path, "float(loss)")
    assert all(torch.isfinite(torch.tensor(found)))
