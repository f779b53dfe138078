"""``deltazoo swap`` reports, ranks and swaps; ``deltazoo distill`` trains and resumes; both refuse what cannot act."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path
from typing import Any

import command_line
import pytest
import torch
from outside_rule import RULES, forget_rules
from tiny_runs import write_text_folder
from tokenizers import processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation import GenerationMixin

from deltazoo.cli import main
from deltazoo.swap import swapped_layers
from deltazoo.training.config import TokenizerConfig
from deltazoo.training.distill import DistillationTrainer
from deltazoo.training.tokens import build_tokenizer

STAGE = {"steps": 2, "row_length": 32, "rows_per_batch": 2, "learning_rate": 1e-3, "log_every": 1}
STAGE |= {"evaluate_every": 2, "evaluation_rows": 2, "save_every": 2, "precision": "fp32"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Llama with a tokenizer, a text, and a recipe."""
    folder = tmp_path_factory.mktemp("swap")
    tokenizer = build_tokenizer(TokenizerConfig("byte"), [])
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, bos_token_id=0, eos_token_id=1))
    for part in (model, tokenizer):
        part.save_pretrained(folder / "llama")
    data = {
        "text": str(write_text_folder(folder / "text", bytes_per_file=500)),
        "validation_fraction": 0.2,
        "max_validation_bytes": 500,
    }
    recipe = {"output": "replaced", "data": data, "align": {**STAGE}, "distill": {**STAGE}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


def call(home: Path, *arguments: str) -> int:
    return command_line.call("swap", str(home / "llama"), "--rule", "delta_net", "--device", "cpu", *arguments)


@pytest.fixture(scope="module")
def swapped(home: Path) -> Path:
    """The Llama with two layers swapped, as the command leaves it."""
    assert call(home, "--layers", "0,2", "--output", str(home / "swapped")) == 0
    return home / "swapped"


def distill(home: Path, *arguments: str) -> int:
    original = ("--original", str(home / "llama"))
    return command_line.call("distill", str(home / "swapped"), *original, *arguments)


def layers_of(path: Path) -> list[int]:
    return sorted(swapped_layers(AutoModelForCausalLM.from_pretrained(path)))


@pytest.mark.parametrize("command", ["swap my_llama", "distill runs/kda"])
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command.split()[0], "--help"])
    assert not stop.value.code
    assert f"deltazoo {command}" in " ".join(capsys.readouterr().out.split())


def test_a_dry_run_reports_and_leaves_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(home.rglob("*"))
    assert call(home, "--layers", "2:1", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "would be swapped" in shown
    assert "q_proj.weight" in shown
    assert set(home.rglob("*")) == before


@pytest.mark.parametrize(("choice", "expected"), [("0,2", [0, 2]), ("all", [0, 1, 2]), ("1:1", [0, 2])])
def test_a_swapped_model_is_saved_with_its_tokenizer(
    home: Path, tmp_path: Path, choice: str, expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(home, "--layers", choice, "--output", str(tmp_path)) == 0
    assert "swapped for" in capsys.readouterr().out
    assert layers_of(tmp_path / "model") == expected
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(tmp_path), "--prompt", "def ", "--max-new-tokens", "2", "--device", "cpu"])
    assert not stop.value.code
    assert call(home, "--output", str(tmp_path)) == 1, "a model is not overwritten"


def test_the_ranking_is_printed_kept_and_used(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ("--text", str(home / "text"), "--rank-tokens", "200")
    assert call(home, "--rank", *text, "--output", str(tmp_path / "rank")) == 0
    assert "rise" in capsys.readouterr().out
    ranking: dict[str, Any] = json.loads((tmp_path / "rank" / "ranking.json").read_text())
    best = min(ranking["layers"], key=lambda score: score["rise"])["layer"]
    assert call(home, "--layers", "best:1", *text, "--output", str(tmp_path / "best")) == 0
    assert layers_of(tmp_path / "best" / "model") == [best]


def test_nothing_is_written_into_the_folder_of_a_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(home.rglob("*"))
    assert call(home, "--output", str(home / "llama")) == 1
    captured = capsys.readouterr()
    shown = "".join(captured.err.split())
    assert "llama holds a saved model (config.json): choose another --output".replace(" ", "") in shown
    assert not captured.out and set(home.rglob("*")) == before


@pytest.mark.parametrize("name", ["ranking.json", "model"])
def test_nothing_is_ranked_into_a_folder_with_results(
    home: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("my own")
    ranking = ("--layers", "best:1", "--text", str(home / "text"), "--rank-tokens", "200", "--output", str(tmp_path))
    assert call(home, *ranking) == 1
    captured = capsys.readouterr()
    # A long path may be wrapped anywhere.
    assert f"{name} exists already: choose another --output".replace(" ", "") in "".join(captured.err.split())
    assert not captured.out and (tmp_path / name).read_text() == "my own"


def test_what_to_do_next_can_be_copied(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that a swap prints runs as it is; it names the file of a rule of the user's, too."""
    monkeypatch.setenv("COLUMNS", "1000")
    swap = ("--load", str(RULES / "trapezoid.py"), "--rule", "trapezoid", "--layers", "1")
    with forget_rules():
        assert call(home, *swap, "--output", str(tmp_path / "two words")) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("next "))
    deltazoo, *arguments = shlex.split(line.removeprefix("next "))
    assert deltazoo == "deltazoo"
    with forget_rules():
        assert command_line.call(*arguments, "--recipe", str(home / "recipe.yaml")) == 0
    assert (tmp_path / "two words_distilled" / "model" / "config.json").is_file()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("next "))
    with forget_rules():
        assert command_line.call(*shlex.split(line.removeprefix("next "))[1:], "--device", "cpu") == 0
    assert "held-out part of" in capsys.readouterr().out


def test_a_distillation_replaces_nothing_of_somebody_else(
    home: Path, swapped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scores.json").write_text("my own")
    assert distill(home, "--recipe", str(home / "recipe.yaml"), "--output", str(tmp_path)) == 1
    said = "".join(capsys.readouterr().err.split())
    assert "scores.json exists already and belongs to no run".replace(" ", "") in said
    assert (tmp_path / "scores.json").read_text() == "my own"


def test_a_distillation_trains_the_swapped_model_and_resumes(
    home: Path, swapped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--recipe", str(home / "recipe.yaml"), "--output", str(tmp_path / "run"))
    assert distill(home, *arguments, "--set", "align.steps=4") == 0
    shown = capsys.readouterr().out
    assert "after distill" in shown
    stages = [line.split() for line in shown.replace("│", " ").splitlines() if "0.001" in line]
    assert stages == [["align", "swapped", "4", "256", "0.001"], ["distill", "all", "2", "128", "0.001"]]
    assert (tmp_path / "run" / "loss.png").is_file()
    assert layers_of(tmp_path / "run" / "model") == [0, 2]
    models = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("model/config.json")}
    assert models == {"run/model", "run/align/model"}, "only the last stage's is in the run's folder"
    assert distill(home, *arguments, "--set", "align.steps=4") == 1
    assert "--resume" in capsys.readouterr().err
    assert distill(home, "--output", str(tmp_path / "run"), "--resume") == 0, "by the recipe that the run keeps"


def test_an_interrupted_distillation_says_how_to_go_on(
    home: Path,
    swapped: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = DistillationTrainer.compute_loss

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(DistillationTrainer, "compute_loss", interrupted)
        assert distill(home, "--recipe", str(home / "recipe.yaml"), "--output", str(tmp_path / "run")) == 143
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("stopped"))
    assert [path.name for path in (tmp_path / "run" / "align").glob("checkpoint-*")] == ["checkpoint-1"]
    assert command_line.call(*shlex.split(line.removeprefix("stopped; to go on: "))[1:]) == 0
    assert "after distill" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "kdaa", "--dry-run"], "did you mean 'kda'"),
        (["--layers", "some", "--dry-run"], "or best:K, got 'some'"),
        (["--layers", "0,7", "--dry-run"], "layers are numbered 0 to 2, got 7"),
        (["--layers", "all"], "say with --output"),
        (["--rank"], "name one with --text"),
        (["--layers", "best:2", "--output", "x"], "name one with --text"),
        (["--layers", "best:4", "--text", "TEXT", "--output", "x"], "best:4 asks for 4 of 3 layers"),
        (["--layers", "best:0", "--text", "TEXT", "--output", "x"], "best:0 asks for 0 of 3 layers"),
        (["--rank", "--text", "./nowhere"], "there is no file or folder './nowhere'"),
        (["--text", "TEXT", "--output", "x"], "act with --rank and --layers best:K only"),
        (["--rank", "--text", "TEXT", "--layers", "0"], "leave out --layers"),
        (["--output", "a_file/x"], "cannot write into a_file/x: Not a directory"),
        (["--rank", "--text", "TEXT", "--output", "a_file/x"], "cannot write into a_file/x: Not a directory"),
    ],
)
def test_bad_input_to_a_swap_is_one_message_and_status_1(
    home: Path,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    assert call(home, *(str(home / "text") if part == "TEXT" else part for part in arguments)) == 1
    assert not refused(message, capsys), "nothing is measured first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "swap_cp"], "did you mean 'swap_cpu'"),
        (["--recipe", "quickstart_cpu"], "names no preset"),
        (["--recipe", "swap_cpu", "--set", "align.stepps=1"], "did you mean 'steps'"),
        (["--text", "./nowhere"], "there is no file or folder './nowhere'"),
        (["--text", "a", "--set", "data.text=b"], "--text a and --set data.text say the same thing"),
        (["--output", "SWAPPED"], "holds the swapped model itself"),
        (["--output", "a_file/x"], "cannot write into a_file/x: Not a directory"),
        (["--output", "x", "--resume"], "there is no file or folder 'x'"),
        (["--output", "x", "--original", "SWAPPED", "--recipe", "RECIPE"], "the model was swapped from one of"),
    ],
)
def test_bad_input_to_a_distillation_is_one_message_and_status_1(
    home: Path,
    swapped: Path,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--original" not in arguments:
        monkeypatch.setattr("deltazoo.training.loading.load_model", pytest.fail)  # said before a model is loaded
    Path("a_file").touch()
    names = {"SWAPPED": str(swapped), "RECIPE": str(home / "recipe.yaml")}
    assert distill(home, *(names.get(part, part) for part in arguments)) == 1
    refused(message, capsys)


def refused(message: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a refused command printed, its message aside."""
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1], "in one line, in which a path stays whole"
    assert "Traceback" not in captured.err
    assert not (Path("x") / "model").exists()
    return captured.out


def test_a_model_with_learned_positions_takes_no_longer_rows(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = build_tokenizer(TokenizerConfig("byte"), [])
    sizes = {"n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1}
    for part in (GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)), tokenizer):
        part.save_pretrained(tmp_path / "gpt2")
    swap = ("swap", str(tmp_path / "gpt2"), "--rule", "kda", "--device", "cpu", "--layers")
    swapped = str(tmp_path / "swapped")
    assert command_line.call(*swap, "0", "--output", swapped) == 0
    text = ("--text", str(home / "text"), "--device", "cpu")
    for model in (str(tmp_path / "gpt2"), swapped):
        assert command_line.call("eval", model, *text, "--max-bytes", "500") == 0
    assert command_line.call("diagnose", swapped, *text, "--tokens", "48") == 0
    capsys.readouterr()

    prompt = ("--prompt", "defgh", "--device", "cpu")
    refused = {
        "documents of --length 25": ("diagnose", swapped, *text, "--length", "25"),
        "6 prompt tokens and --max-new-tokens 20 together": ("generate", swapped, *prompt, "--max-new-tokens", "20"),
        "rows of align.row_length=32": (
            *("distill", swapped, "--original", str(tmp_path / "gpt2"), "--output", swapped + "2"),
            *("--recipe", str(home / "recipe.yaml")),
        ),
    }
    for what, command in refused.items():
        assert f"Error: {what} exceed the 24 learned positions of" in command_line.refused(*command)
    assert command_line.call("generate", swapped, *prompt, "--max-new-tokens", "18") == 0


def test_a_prompt_without_tokens_is_refused(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = build_tokenizer(TokenizerConfig("byte"), [])
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()  # as Qwen's, which begin with no token
    tokenizer.save_pretrained(tmp_path)
    LlamaForCausalLM.from_pretrained(home / "llama").save_pretrained(tmp_path)
    said = command_line.refused("generate", str(tmp_path), "--prompt", "", "--device", "cpu")
    assert "Error: --prompt '' has no tokens" in said


def test_generate_takes_the_shorter_loop_where_it_serves_the_model(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(home, "--layers", "1:1", "--output", str(tmp_path)) == 0
    asked: list[str] = []
    ordinary = GenerationMixin.generate

    def counted(model: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(type(model).__name__)
        return ordinary(model, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", counted)

    def text(path: Path, *options: str) -> str:
        capsys.readouterr()
        prompt = ("--prompt", "def f", "--max-new-tokens", "12", "--device", "cpu")
        assert command_line.call("generate", str(path), *prompt, *options) == 0
        return capsys.readouterr().out

    greedy = text(tmp_path, "--temperature", "0")
    assert text(tmp_path, "--seed", "1") == text(tmp_path, "--seed", "1") != text(tmp_path, "--seed", "2")
    assert not asked
    text(home / "llama")
    assert asked == ["LlamaForCausalLM"]
    rules = tmp_path / "model" / "generation_config.json"
    config = json.loads(rules.read_text())
    rules.write_text(json.dumps({**config, "exponential_decay_length_penalty": [100, 1.0]}))  # it begins after the end
    assert text(tmp_path, "--temperature", "0") == greedy
    assert asked == ["LlamaForCausalLM", "DeltazooLlamaForCausalLM"]
    rules.write_text(json.dumps({**config, "min_p": 0.1}))
    assert text(tmp_path, "--temperature", "0") == greedy and len(asked) == 2  # nothing is drawn
    text(tmp_path)
    assert len(asked) == 3


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])  # transformers makes the latter one of special tokens
def test_a_model_without_tokenizer_is_reported_on_and_not_swapped(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 16, "head_dim": 16, "num_key_value_heads": 2}
    config = AutoConfig.for_model(model_type, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    assert call(tmp_path, "--dry-run") == 0
    assert "would be swapped" in capsys.readouterr().out
    assert call(tmp_path, "--output", str(tmp_path / "x")) == 1
    assert "holds a model, but no tokenizer" in " ".join(capsys.readouterr().err.split())
