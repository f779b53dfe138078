"""`--load RULE.py`: every command that takes the name of a rule accepts one from a file outside the package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import command_line
import pytest
from outside_rule import RULES, forget_rules
from tiny_runs import run_config, write_text_folder
from transformers import LlamaConfig, LlamaForCausalLM

from deltazoo.cli.options import load_rule_file
from deltazoo.training import save_config
from deltazoo.training.config import TokenizerConfig
from deltazoo.training.tokens import build_tokenizer

RULE = str(RULES / "trapezoid.py")


def call(*arguments: str) -> int:
    """A command in a process that has loaded no rule before."""
    with forget_rules():
        return command_line.call(*arguments)


@pytest.fixture(autouse=True)
def no_rule_is_left() -> Iterator[None]:
    with forget_rules():
        yield


def test_a_rule_is_trained_scored_and_sampled_from_and_never_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text_folder(tmp_path / "text", bytes_per_file=1000)
    config = run_config(text, tmp_path / "run", model={"mixer": "trapezoid"})
    save_config(config, tmp_path / "config.yaml")
    assert call("train", str(tmp_path / "config.yaml")) == 1
    assert "--load FILE.py" in " ".join(capsys.readouterr().err.split())
    assert call("train", str(tmp_path / "config.yaml"), "--output", str(tmp_path / "again"), "--load", RULE) == 0
    for command in (["eval"], ["generate", "--prompt", "def ", "--max-new-tokens", "3"]):
        name, *options = command
        assert call(name, str(tmp_path / "again"), *options, "--load", RULE) == 0
        capsys.readouterr()
        assert call(name, str(tmp_path / "again"), *options) == 1
        message = " ".join(capsys.readouterr().err.split())
        assert "'trapezoid', which does not come with deltazoo" in message and "--load trapezoid.py" in message


def test_a_rule_is_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list", "--load", RULE) == 0
    assert "trapezoidal" in capsys.readouterr().out
    assert call("show", "trapezoid", "--load", RULE) == 0
    shown = capsys.readouterr().out
    assert "Crank and Nicolson" in shown
    assert f"deltazoo train paper_340m --rule trapezoid --load {RULE}\n" in shown, "as it can be copied"
    assert call("show", "trapezoid") == 1


def test_a_rule_is_swapped_in(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig("byte"), [])
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    swap = ["swap", str(tmp_path / "llama"), "--rule", "trapezoid", "--output", str(tmp_path / "out")]
    assert call(*swap) == 1
    assert call(*swap, "--load", RULE, "--device", "cpu") == 0
    (config,) = (tmp_path / "out").rglob("config.json")
    assert '"mixer_module": "trapezoid"' in config.read_text()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("broken.py", "import torch\n\nundefined\n", "broken.py, line 3: NameError: name 'undefined'"),
        ("halves.py", "def f(:\n", "SyntaxError"),
        ("random.py", "", "cannot be loaded as a module 'random'"),
        (
            "antigravity.py",
            "",
            "cannot be loaded as a module 'antigravity'",
        ),  # in the standard library, not imported yet
        ("my-rule.py", "", "cannot be loaded as a module 'my-rule'"),
    ],
)
def test_a_file_that_cannot_be_loaded_says_why(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert call("list", "--load", str(tmp_path / name)) == 1
    said = "".join(capsys.readouterr().err.split())  # a long path is wrapped anywhere
    assert "".join(message.split()) in said


def test_what_a_broken_file_registered_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "trapezoid.py"
    path.write_text(Path(RULE).read_text() + "\nundefined\n")
    with pytest.raises(ValueError, match="undefined"):
        load_rule_file(path)
    path.write_text(Path(RULE).read_text())
    assert load_rule_file(path) == load_rule_file(path) == ["trapezoid"]
