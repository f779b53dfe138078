"""The command line: every command works, explains itself, and answers bad input with one line and status 1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import run_config, write_text_folder

import deltazoo
from deltazoo.cli import main
from deltazoo.cli.presets import find_config, presets
from deltazoo.training import save_config

COMMANDS = ["list", "show", "train", "generate", "eval"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, made through the command line."""
    folder = tmp_path_factory.mktemp("cli")
    config = run_config(write_text_folder(folder / "text"), folder / "run")
    save_config(config, folder / "config.yaml")
    call("train", str(folder / "config.yaml"))
    return folder / "run"


def call(*arguments: str) -> int:
    try:
        main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "--help") == 0
    shown = capsys.readouterr().out
    assert "Example" in shown
    assert f"deltazoo {command}" in " ".join(shown.split())


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out.strip() == deltazoo.__version__


def test_list_names_every_variant(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list") == 0
    shown = capsys.readouterr().out
    assert all(variant in shown for variant in deltazoo.list_variants())


@pytest.mark.parametrize("variant", deltazoo.list_variants())
def test_show_describes_a_variant(variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", variant) == 0
    shown = "".join(capsys.readouterr().out.split())
    spec = deltazoo.get_variant(variant)
    assert "".join(spec.equation.split()) in shown
    assert f"{variant}_340m" in shown


def test_training_leaves_model_curve_and_configuration(run: Path) -> None:
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "model" / "training.yaml").is_file()


def test_eval_scores_the_held_out_files_beside_the_baselines(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("eval", str(run), "--json", str(tmp_path / "score.json"), "--primed") == 0
    shown = capsys.readouterr().out
    figures = json.loads((tmp_path / "score.json").read_text())
    names = [baseline["name"] for baseline in figures["baselines"]]
    assert names == ["gzip -9", "xz -9", "xz -9, primed", "order-2 byte model"]
    for value in [figures["bits_per_byte"], *(baseline["bits_per_byte"] for baseline in figures["baselines"])]:
        assert f"{value:.3f}" in shown
    assert 0 < figures["bits_per_byte"] < 8
    assert figures["score"]["bytes"] >= 3000


def test_eval_scores_another_text(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some other text\n" * 20)
    (tmp_path / "texts" / "b.txt").write_text("never read\n")
    score = tmp_path / "score.json"
    assert (
        call("eval", str(run / "model"), "--text", str(tmp_path / "texts"), "--max-bytes", "9", "--json", str(score))
        == 0
    )
    assert json.loads(score.read_text())["score"]["bytes"] == 320


def test_generate_continues_the_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", str(run), "--prompt", "def f(", "--max-new-tokens", "8")
    assert call(*arguments, "--seed", "3") == 0
    first = capsys.readouterr().out
    assert first.startswith("def f(")
    assert len(first) > len("def f(\n")
    assert call(*arguments, "--seed", "3") == 0
    assert capsys.readouterr().out == first
    assert call(*arguments, "--temperature", "0") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command"),
        (["list", "--nonsense"], "No such option"),
        (["show", "gated_deltanett"], "did you mean 'gated_deltanet'"),
        (["train", "nowhere.yaml"], "there is no file 'nowhere.yaml'"),
        (["train", "quickstart_cp"], "did you mean 'quickstart_cpu'"),
        (["train", "quickstart_cpu", "--set", "training.stepps=3"], "did you mean 'steps'"),
        (["eval", "./nowhere"], "there is no folder './nowhere'"),
        (["generate", "/", "--prompt", "x"], "holds no model"),
        (["generate", "/", "--prompt", "x", "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
    ],
)
def test_bad_input_is_one_message_and_status_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == 1
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err


def test_options_without_effect_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("eval", str(run), "--max-bytes", "100") == 1
    assert "act on --text only" in capsys.readouterr().err


def test_a_run_is_not_overwritten(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train", str(run.parent / "config.yaml")) == 1
    assert "--resume" in capsys.readouterr().err
    assert call("train", str(run.parent / "config.yaml"), "--resume") == 0


def test_the_traceback_is_there_for_who_asks() -> None:
    with pytest.raises(ValueError, match="no file 'nowhere.yaml'"):
        main(["--traceback", "train", "nowhere.yaml"])


def test_presets_are_found_by_name_and_by_path() -> None:
    assert find_config("quickstart_cpu") == presets()["quickstart_cpu"]
    path = presets()["kda_340m"]
    assert find_config(str(path)) == path


def test_the_help_of_a_fresh_process_needs_no_torch() -> None:
    code = (
        "import sys; from deltazoo.cli.app import build_app; build_app();"
        "assert not {'transformers', 'matplotlib', 'datasets'} & set(sys.modules), 'heavy imports at start'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
