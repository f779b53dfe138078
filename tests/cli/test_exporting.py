"""`deltazoo export` on the command line."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from command_line import invoke
from safetensors.torch import load_file
from tiny_models import tiny_named
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import deltazoo
from deltazoo.training.config import TokenizerConfig
from deltazoo.training.tokens import build_tokenizer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run, whose model has a tokenizer."""
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), [])
    tiny_named("gated_deltanet", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "run" / "model")
    tokenizer.save_pretrained(tmp_path / "run" / "model")
    return tmp_path / "run"


def test_a_run_goes_out_and_comes_back(run: Path, tmp_path: Path) -> None:
    outcome = invoke("export", str(run), "--to", "qwen3_5_text", "--out", str(tmp_path / "out"))
    assert outcome.exit_code == 0
    assert "logits of two rows differ by at most" in outcome.output and "alone" in outcome.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3_5_text"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("def").input_ids

    outcome = invoke("export", str(tmp_path / "out"), "--to", "fla", "--out", str(tmp_path / "back"))
    assert outcome.exit_code == 0 and "our reader of its format" in outcome.output
    saved, back = (load_file(folder / "model.safetensors") for folder in (run / "model", tmp_path / "back"))
    assert saved.keys() == back.keys() and all(torch.equal(saved[name], back[name]) for name in saved)


def test_refusals_are_one_sentence(run: Path, tmp_path: Path) -> None:
    outcome = invoke("export", str(run), "--to", "olmo_hybrid", "--out", str(tmp_path / "out"))
    assert outcome.exit_code == 1 and "olmo_hybrid cannot express this model: norm_eps=1e-06" in outcome.output
    outcome = invoke("export", str(run), "--to", "olmo_hybird", "--out", str(tmp_path / "out"))
    assert outcome.exit_code == 1 and "unknown target 'olmo_hybird'; did you mean 'olmo_hybrid'?" in outcome.output
    outcome = invoke("export", str(run), "--to", "fla", "--out", str(run))
    assert outcome.exit_code == 1 and "exists and is no empty folder: name a new one" in outcome.output
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=259)
    swapped = LlamaForCausalLM(LlamaConfig(**sizes))
    deltazoo.swap_attention(swapped, "gated_deltanet")
    swapped.save_pretrained(tmp_path / "swapped")
    outcome = invoke("export", str(tmp_path / "swapped"), "--to", "fla", "--out", str(tmp_path / "out"))
    assert outcome.exit_code == 1 and "swapped ones have none elsewhere" in outcome.output
    assert not (tmp_path / "out").exists()


def test_without_a_tokenizer_and_without_the_comparison(run: Path, tmp_path: Path) -> None:
    for path in (run / "model").glob("tokenizer*"):
        path.unlink()
    outcome = invoke("export", str(run), "--to", "fla", "--out", str(tmp_path / "out"), "--no-check")
    assert outcome.exit_code == 0
    assert "holds no tokenizer" in outcome.output and "not checked" in outcome.output
    assert not list((tmp_path / "out").glob("tokenizer*"))
    for name, target in (("qwen", "qwen3_5_text"), ("back", "fla")):  # transformers makes one of special tokens alone
        source = str(run if name == "qwen" else tmp_path / "qwen")
        assert invoke("export", source, "--to", target, "--out", str(tmp_path / name), "--no-check").exit_code == 0
        assert not list((tmp_path / name).glob("tokenizer*"))


def test_a_full_disk_is_one_sentence(run: Path, tmp_path: Path) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, unlimited[1]))
    try:
        outcome = invoke("export", str(run), "--to", "fla", "--out", str(tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert outcome.exit_code == 1
    assert f"Error: could not save into {tmp_path / 'out'}: File too large. Nothing had been saved" in outcome.output
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_show_says_where_a_rule_can_go() -> None:
    assert "exports to kimi_linear (gate_bias=False), fla" in invoke("show", "kda").output
    assert "exports to no format of others" in invoke("show", "longhorn").output
