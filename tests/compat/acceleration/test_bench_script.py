"""scripts/bench_accelerate.py measures every phase and writes where and with what."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from script_modules import load_script


@pytest.fixture
def script(monkeypatch):
    module = load_script("bench_accelerate")
    monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setitem(module.COMMON, "vocab_size", 64)
    monkeypatch.setattr(module, "BUDGET", 0)
    monkeypatch.setattr(module, "NEW_TOKENS", 6)
    return module


def test_small_run_on_a_cpu(script, tmp_path, monkeypatch, capsys):
    out = tmp_path / "result.json"
    arguments = ["--device", "cpu", "--small", "--families", "qwen3_next", "--tokens", "80", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_accelerate.py", *arguments])
    assert script.main() == 0
    content = json.loads(out.read_text(encoding="utf-8"))
    assert content["run"]["commit"] and content["run"]["cpu"] and content["run"]["transformers"]
    assert [row["phase"] for row in content["rows"]] == script.PHASES
    for row in content["rows"]:
        assert row["after"]["low"] <= row["after"]["tokens_per_s"] <= row["after"]["high"]
        assert (row["before"] is None) == (row["phase"] == "packed training")
        assert ("decoding" in row) == (row["phase"] == "generate")
    printed = capsys.readouterr().out
    assert all(phase in printed for phase in script.PHASES)


def test_no_token_ends_what_is_timed(script):
    model = script.make_model("qwen3_next", True, torch.device("cpu"), torch.float32)
    prompt = torch.randint(3, 64, (1, 8))
    with script.inference(model):
        model.generation_config.eos_token_id = model(prompt).logits[0, -1].argmax().item()
        assert model.generate(prompt, do_sample=False, max_new_tokens=6).shape == (1, 9)
        (phase,) = script.decoding(model, prompt, accelerated=False)
        assert phase.call().shape == (1, 8 + phase.tokens)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU, and here is one")
def test_without_a_gpu_it_says_what_to_do(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_accelerate.py"])
    assert script.main() == 1
    assert "try --device cpu --small" in capsys.readouterr().err


def test_documents_fill_the_row(script):
    lengths = script.document_lengths(8192)
    assert sum(lengths) == 8192 and all(0 < n <= 2048 for n in lengths) and len(lengths) > 8
