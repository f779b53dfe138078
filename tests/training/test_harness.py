"""The recipe of docs/training.md on every kind of model: lm-evaluation-harness finds what the model itself says.

`make harness-test` installs the harness in an environment of its own and runs these tests; others leave them out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import foreign_model
from outside_rule import RULES, forget_rules
from tiny_families import tiny_original
from transformers import AutoModelForCausalLM

import deltazoo
from deltazoo.cli import main
from deltazoo.cli.options import load_rule_file
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM
from deltazoo.training.config import TokenizerConfig
from deltazoo.training.tokens import build_tokenizer

pytestmark = pytest.mark.harness

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
FILE = re.compile(r"`(tasks/\w+\.\w+)`[^`]*:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TASKS = "facts_choice,facts_likelihood,facts_generate"


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's files in the current folder, and no network."""
    files = FILE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(files) == 4
    (tmp_path / "tasks").mkdir()
    for name, text in files:
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for variable, value in {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(variable, value)


def save(kind: str) -> Any:
    """A tiny model with random weights and a byte tokenizer, saved under the name of its kind."""
    tokenizer = build_tokenizer(TokenizerConfig("byte"), [])
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    options: dict[str, Any] = {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in names}}
    torch.manual_seed(0)
    if kind == "own":
        sizes = dict(hidden_size=32, num_hidden_layers=2, num_heads=2, head_dim=8, intermediate_size=48)
        config = DeltaRuleConfig(mixer="gated_deltanet", initializer_range=0.2, **sizes, **options)
        model: Any = DeltaRuleForCausalLM(config)
    elif kind == "swapped":
        model = tiny_original("llama", max_position_embeddings=256, **options)
        deltazoo.swap_attention(model, "gated_deltanet", layers=[1, 2])
    else:
        model = foreign_model("qwen3_next", **options)
    model.eval().save_pretrained(kind, **({"remote_code": True} if kind == "own" else {}))
    tokenizer.save_pretrained(kind)
    return tokenizer


def samples(folder: str, task: str) -> list[dict[str, Any]]:
    (file,) = Path(folder).rglob(f"samples_{task}_*.jsonl")
    return sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda sample: sample["doc_id"])


def log_likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    """Of the continuation, from one forward pass over this row alone."""
    ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
    count = len(tokenizer(context + continuation)["input_ids"]) - len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        scores = model(ids).logits[0, :-1].double().log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[-count:].sum().item()


def generated(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True).split("\n")[0]


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", ["own", "swapped", "native"])
def test_scores_are_those_of_each_row_alone(
    kind: str, batch_size: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right padding in likelihoods, left padding in generation; the model itself, called row by row, says the same."""
    from deltazoo.training import evaluate

    accelerated: list[Any] = []
    monkeypatch.setattr(evaluate, "accelerate", lambda model: accelerated.append(deltazoo.accelerate(model)))
    tokenizer = save(kind)
    arguments = ["--model", "deltazoo" if kind == "native" else "hf", "--model_args", f"pretrained={kind}"]
    arguments += ["--include_path", "tasks", "--tasks", TASKS, "--device", "cpu", "--batch_size", str(batch_size)]
    with pytest.raises(SystemExit) as stop:
        main(["lm-eval", *arguments, "--log_samples", "--output_path", "results"])
    assert stop.value.code == 0
    assert "|facts_choice" in capsys.readouterr().out
    assert len(accelerated) == (kind == "native")

    model = AutoModelForCausalLM.from_pretrained(kind).eval()
    if kind == "native":
        deltazoo.accelerate(model)
    for sample in samples("results", "facts_choice"):
        document = sample["doc"]
        expected = [log_likelihood(model, tokenizer, document["question"], f" {x}") for x in document["choices"]]
        assert [float(found[0]) for found in sample["filtered_resps"]] == pytest.approx(expected, rel=1e-4, abs=1e-3)
        assert sample["acc"] == float(expected.index(max(expected)) == document["answer"])
    for sample in samples("results", "facts_likelihood"):
        document = sample["doc"]
        answer = f" {document['choices'][document['answer']]}"
        expected = [log_likelihood(model, tokenizer, document["question"], answer)]
        assert [float(found[0]) for found in sample["filtered_resps"]] == pytest.approx(expected, rel=1e-4, abs=1e-3)
    for sample in samples("results", "facts_generate"):
        assert sample["filtered_resps"][0] == generated(model, tokenizer, sample["doc"]["question"])


def test_the_ordinary_command_takes_models_with_remote_code() -> None:
    save("own")
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", "pretrained=own", "--device", "cpu"]
    command += ["--trust_remote_code", "--include_path", "tasks", "--tasks", "facts_choice", "--output_path", "results"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (results,) = Path("results").rglob("results_*.json")
    assert 0 <= json.loads(results.read_text())["results"]["facts_choice"]["acc,none"] <= 1


def test_rules_of_users_are_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    rule = RULES / "trapezoid.py"
    with forget_rules():
        (name,) = load_rule_file(rule)
        tokenizer = save("own")
        config = DeltaRuleConfig(mixer=name, hidden_size=32, num_hidden_layers=1, num_heads=2, vocab_size=258)
        DeltaRuleForCausalLM(config).save_pretrained("outside")
        tokenizer.save_pretrained("outside")
    with forget_rules(), pytest.raises(SystemExit) as stop:
        arguments = ["--model", "hf", "--model_args", "pretrained=outside", "--device", "cpu"]
        main(["lm-eval", "--load", str(rule), *arguments, "--include_path", "tasks", "--tasks", "facts_choice"])
    assert stop.value.code == 0 and "|facts_choice" in capsys.readouterr().out


def test_a_model_without_a_delta_rule_layer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = save("own")
    tiny_original("llama", vocab_size=len(tokenizer)).save_pretrained("softmax")
    tokenizer.save_pretrained("softmax")
    arguments = ["--model", "deltazoo", "--model_args", "pretrained=softmax", "--device", "cpu"]
    with pytest.raises(SystemExit) as stop:
        main(["lm-eval", *arguments, "--include_path", "tasks", "--tasks", "facts_choice"])
    assert stop.value.code == 1
    assert "no delta-rule layer of transformers" in capsys.readouterr().err.replace("\n", " ")
