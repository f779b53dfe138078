"""docs/new_rules.md: its files pass the check, and its commands run, on a smaller model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from command_line import call
from outside_rule import forget_rules
from tiny_runs import write_text_folder

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "new_rules.md").read_text(encoding="utf-8")
SMALLER = (
    "model.hidden_size=32 model.num_heads=2 model.head_dim=16 model.num_hidden_layers=1 model.intermediate_size=32"
)
SMALLER += " tokenizer.vocab_size=320 training.steps=2 training.row_length=32 training.rows_per_batch=2 data.text=text"
SMALLER += " training.save_every=2 training.evaluate_every=2 training.log_every=1 data.validation_fraction=0.3"


def commands() -> list[list[str]]:
    return [shlex.split(line) for line in re.findall(r"^    deltazoo (.*)$", PAGE, re.MULTILINE)]


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert [name for _, name in files] == ["trapezoid.py", "erase_gate.py", "centred_values.py"]
    for text, name in files:
        (tmp_path / name).write_text(text)
    write_text_folder(tmp_path / "text", bytes_per_file=1000)
    monkeypatch.chdir(tmp_path)
    run = set()
    for name, *arguments in commands():
        if name == "swap":  # tests/cli/test_load.py runs it
            continue
        smaller = [part for value in SMALLER.split() for part in ("--set", value)] if name == "train" else []
        with forget_rules():
            assert call(name, *arguments, *smaller) == 0, (name, arguments)
        run.add(name)
    assert run == {"check", "show", "train", "eval", "generate", "diagnose"}


def test_the_module_of_another_form_works_in_a_model() -> None:
    """Cached, padded and in training, as the layers of a rule do."""
    (block,) = re.findall(
        r"^```python\n(.*?class StepwiseMomentum.*?)^```$", PAGE.partition("## A module of")[2], re.M | re.S
    )
    namespace: dict = {"__name__": "page"}
    exec(block, namespace)
    model = namespace["model"].eval()
    tokens = torch.randint(300, (2, 9))
    with torch.no_grad():
        whole = model(tokens).logits
        cache, steps = None, []
        for part in tokens.split([5, 1, 1, 2], dim=1):
            result = model(part, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            steps.append(result.logits)
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[0, :3] = mask[1, 9:] = 0
        padded = torch.zeros(2, 12, dtype=torch.int64).masked_scatter(mask.bool(), tokens)
        logits = model(padded, attention_mask=mask).logits[mask.bool()].view_as(whole)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-5)
    changed = torch.cat([tokens[:, :-1], (tokens[:, -1:] + 1) % 300], dim=1)
    assert torch.equal(model(changed).logits[:, :-1], whole[:, :-1])
    model.train()(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    model.generate(tokens, num_beams=2, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"(?s)model\.layers"):
        model.save_pretrained("never")
