"""The command line: every command works, has help, and answers bad input with one line and status 1."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from command_line import call, refused
from fake_hub import names_asked
from few_rules import FEW_RULES
from helpers import run_python
from safetensors.torch import load_file, save_file
from tiny_runs import run_config, write_text_folder
from transformers import AutoConfig

import deltazoo
from deltazoo.cli import main
from deltazoo.cli.training import configuration
from deltazoo.training import load_config, save_config
from deltazoo.training.folder import checkpoints
from deltazoo.training.loading import find_config, presets
from deltazoo.training.trainer import TrainingInterrupted

COMMANDS = [
    "list",
    "show",
    "check",
    "train",
    "swap",
    "distill",
    "export",
    "generate",
    "serve",
    "eval",
    "diagnose",
    "lm-eval",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, made through the command line."""
    folder = tmp_path_factory.mktemp("cli")
    config = run_config(write_text_folder(folder / "text"), folder / "run")
    save_config(config, folder / "config.yaml")
    call("train", str(folder / "config.yaml"))
    return folder / "run"


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    shown = capsys.readouterr().out
    assert all(command.split()[0] in shown for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "--help") == 0
    shown = capsys.readouterr().out
    assert "Example" in shown
    assert f"deltazoo {command}" in " ".join(shown.split())


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out.strip() == deltazoo.__version__


def test_list_names_every_rule_and_its_paper_in_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list") == 0
    shown = capsys.readouterr().out
    for rule in deltazoo.list_rules():
        number = deltazoo.get_rule(rule).paper.partition("arXiv:")[2]
        assert any(line.split()[:1] == [rule] and number in line for line in shown.splitlines()), rule


def test_in_a_pipe_no_line_of_the_list_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert call("list") == 0
    shown = capsys.readouterr().out
    for rule in deltazoo.list_rules():
        assert any(
            line.split()[:1] == [rule] and deltazoo.get_rule(rule).summary in line for line in shown.splitlines()
        )


@pytest.mark.parametrize("rule", FEW_RULES)
def test_show_describes_a_rule(rule: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert call("show", rule) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(line.endswith(f" {deltazoo.get_rule(rule).equation}") for line in shown), "no line is broken"
    assert any(line.endswith(f" deltazoo train paper_340m --rule {rule}") for line in shown)


@pytest.mark.parametrize("rule", deltazoo.list_rules())
def test_show_says_which_heads_a_layer_and_a_model_have(rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", rule) == 0
    shown = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    spec, per_head = deltazoo.get_rule(rule), "hidden_size / num_heads"
    assert shown["layer"] == f"head_dim is {per_head} unless given, {spec.expand_v:g} * head_dim for values"
    with torch.device("meta"):
        assert deltazoo.layers.make_layer(rule, 96, 3).head_k_dim == 32
    mixer = {} if spec.hub_model_type else {"mixer": rule}
    config = AutoConfig.for_model(spec.hub_model_type or "delta_rule", hidden_size=96, num_heads=3, **mixer)
    said = shown["model_type"].partition("; head_dim is ")[2].removesuffix(" unless given")
    assert config.head_dim == {per_head: 32, f"{per_head} / 2": 16}.get(said) or int(said)


@pytest.mark.parametrize(
    ("rule", "eigenvalue"),
    [("gla", "none: it does not erase"), ("kda", "[0, 1]"), ("neg_delta_net", "[-1, 1]"), ("comba", "within [-1, 1]")],
)
def test_show_says_how_far_a_step_erases(rule: str, eigenvalue: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", rule) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("eigenvalue of a step"))
    assert line.removeprefix("eigenvalue of a step").strip() == eigenvalue


def test_training_leaves_model_curve_and_configuration(run: Path) -> None:
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "model" / "training.yaml").is_file()


def test_a_checkpoint_is_scored_on_the_held_out_text_of_its_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("eval", str(next(run.glob("checkpoint-*")))) == 0
    assert "held-out part of" in capsys.readouterr().out


def test_eval_scores_the_held_out_files_beside_the_baselines(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("eval", str(run), "--json", str(tmp_path / "score.json"), "--primed") == 0
    shown = capsys.readouterr().out
    figures = json.loads((tmp_path / "score.json").read_text())
    names = [baseline["name"] for baseline in figures["baselines"]]
    assert names == ["gzip -9", "xz -9", "xz -9, primed"]
    for value in [figures["bits_per_byte"], *(baseline["bits_per_byte"] for baseline in figures["baselines"])]:
        assert f"{value:.3f}" in shown
    assert 0 < figures["bits_per_byte"] < 8
    assert figures["score"]["bytes"] >= 3000


def test_diagnose_prints_draws_and_writes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, figures = tmp_path / "layers.png", tmp_path / "figures.json"
    assert call("diagnose", str(run), "--length", "100", "--picture", str(picture), "--json", str(figures)) == 0
    shown = capsys.readouterr().out
    assert "held-out part" in shown and "model.layers.0.attn" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [record["head"] for record in json.loads(figures.read_text())] == [0, 1]
    (tmp_path / "text.txt").write_text("a text of its own, " * 40)
    assert call("diagnose", str(run), "--text", str(tmp_path / "text.txt"), "--tokens", "64", "--length", "64") == 0
    assert "64 tokens in 1 sequence;" in capsys.readouterr().out


def test_the_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = refused("lm-eval", "--model", "hf")
    assert "lm-evaluation-harness is not installed: pip install '.[harness]'" in said


def test_eval_scores_another_text(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some other text\n" * 20)
    (tmp_path / "texts" / "b.txt").write_text("never read\n")
    score = tmp_path / "score.json"
    assert (
        call("eval", str(run / "model"), "--text", str(tmp_path / "texts"), "--max-bytes", "9", "--json", str(score))
        == 0
    )
    assert json.loads(score.read_text())["score"]["bytes"] == 9, "cut inside a file"
    assert "9 bytes are too few for a comparison" in " ".join(capsys.readouterr().err.split())


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
        (["train", "nowhere.yaml"], "there is no file or folder 'nowhere.yaml'"),
        (["lab"], "No such command 'lab'"),
        (["train", "quickstart_cp"], "did you mean 'quickstart_cpu'"),
        (["train", "kda"], "did you mean `deltazoo train quickstart_cpu --rule kda`?"),
        (["train", __file__], "test_cli.py is not a YAML file (a text to train on: --text "),
        (["train", "kda_340m"], "did you mean `deltazoo train paper_340m --rule kda`?"),
        (["train", "comba_unit_erase_340m"], "`deltazoo train paper_340m --rule comba_unit_erase`?"),
        (["train", "delta_net_1.3b"], "`deltazoo train paper_1.3b --rule delta_net`?"),
        (["train", "gated_deltanet_hybrid_340m"], "`deltazoo train hybrid_340m --rule gated_deltanet`?"),
        (["train", "neg_kda_340m"], "`deltazoo train paper_340m --rule kda --set model.allow_neg_eigval=true`?"),
        (["train", "olmo_hybrid_340m"], "`deltazoo train native_340m`?"),
        (["train", "nonsense_340m"], "it names no preset"),
        (["train", "paper_340m", "--rule", "kad"], "did you mean 'kda'"),
        (["train", "native_340m", "--rule", "kda"], "--rule acts on our own models"),
        (["train", "paper_340m", "--rule", "kda", "--set", "model.mixer=gla"], "say the same thing"),
        (["check", "kda", "--report", "x.md"], "act without a rule only"),
        (["check", "--backend", "chunk"], "did you mean 'chunkwise'"),
        (["check", "--report", "/"], "--report names the file to write, and / is a folder"),
        (["train", "quickstart_cpu", "--set", "training.stepps=3"], "did you mean 'steps'"),
        (["train"], "name a configuration, or a text with --text"),
        (["train", "--text", "a", "--set", "data.text=b"], "--text a and --set data.text say the same thing"),
        (["train", "--output", "a", "quickstart_cpu", "--set", "output=b"], "--output a and --set output say the same"),
        (["train", "/"], "the folder '/' holds no run"),
        (["train", "--text", "nowhere.txt"], "there is no file or folder 'nowhere.txt'"),
        (["train", "quickstart_cpu", "--set", "data.pattern=**/*.py"], "data.pattern does not act on the standard"),
        (["train", "quickstart_cpu", "--set", "training.betas=[0.9"], "training.betas must be a list, got"),
        (["train", "quickstart_cpu", "--resume", "--output", "/nowhere"], "there is nothing to resume in /nowhere"),
        (["eval", "./nowhere"], "there is no folder './nowhere'"),
        (["eval", "./nowhere", "--text", "nowhere.txt"], "there is no folder './nowhere'"),
        (["eval", "./nowhere", "--json", "/nowhere/score.json"], "there is no folder '/nowhere'"),
        (["diagnose", "./nowhere"], "there is no folder './nowhere'"),
        (["diagnose", "./nowhere", "--picture", "/nowhere/a.png"], "there is no folder '/nowhere' for --picture"),
        (["eval", "./nowhere", "--json", "/"], "--json names the file to write, and / is a folder"),
        (["diagnose", "./nowhere", "--json", "/"], "--json names the file to write, and / is a folder"),
        (["eval", "./nowhere", "--json", "/dev/null"], "--json names the file to write, and /dev/null is a device"),
        (["eval", "./nowhere", "--json", "/proc/score.json"], "cannot write into /proc: "),
        (["diagnose", "./nowhere", "--picture", "/proc/a.png"], "cannot write into /proc: "),
        (["check", "--backend", "nowhere", "--report", "/proc/report.md"], "cannot write into /proc: "),
        (["export", "./nowhere", "--to", "fla", "--out", "/proc/out"], "cannot write into /proc/out: "),
        (["train", "quickstart_cpu", "--output", "/proc/run"], "cannot write into /proc/run: "),
        (["diagnose", "./nowhere", "--picture", "a.xyz"], "--picture writes a PNG: give a name that ends in .png"),
        (["eval", "./nowhere", "--device", "tpu"], "there is no device 'tpu': give cpu, cuda"),
        (["generate", "./nowhere", "--prompt", "x", "--device", "gpu"], "there is no device 'gpu'"),
        (["swap", "./nowhere", "--rule", "kda", "--dry-run"], "there is no folder './nowhere'"),
        (["generate", "/", "--prompt", "x"], "holds no model"),
        (
            ["serve", "/"],
            "give the folder of a model or of a run; to train on the texts in it: deltazoo train --text /",
        ),
        (["serve", __file__], "test_cli.py is a file: give the folder of a model or of a run"),
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


def test_a_protected_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "score.json").touch()
    monkeypatch.setattr("deltazoo.cli.options.os.access", lambda path, mode: False)  # root may write everywhere
    assert "score.json: Permission denied" in refused("eval", "./nowhere", "--json", str(tmp_path / "score.json"))


@pytest.mark.parametrize("arguments", [["eval", "./my_text"], ["train", "--text", "./my_text"]])
def test_a_mistyped_path_is_answered_with_the_nearest(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_texts").mkdir()
    assert "did you mean 'my_texts'?" in refused(*arguments)


def test_an_adapter_alone_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    said = refused("generate", str(tmp_path), "--prompt", "x")
    assert "holds an adapter of PEFT without its model: merge them first" in said


@pytest.mark.parametrize("option", [["--top-k", "3"], ["--top-p", "0.2"]])
def test_a_filter_without_sampling_is_refused(option: list[str]) -> None:
    said = refused("generate", "/", "--prompt", "x", "--temperature", "0", *option)
    assert "with --temperature 0 there is none: leave them out" in said


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["eval"], ["diagnose"], ["eval", "--text", "x"]])
def test_a_name_that_is_nowhere_is_asked_for_once(
    command: list[str], offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks for each file six times, for 25 seconds, before it reports that there is no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    asked = names_asked(monkeypatch)
    shown = refused(command[0], "runs/nowhere", *command[1:])
    assert shown == "Error: there is no folder 'runs/nowhere', and the Hub cannot be asked for it: no network"
    assert asked == ["runs/nowhere"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_model_is_one_message_and_status_1(
    run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    file = tmp_path / "model" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert call("generate", str(tmp_path), "--prompt", "x") == 1
    shown = capsys.readouterr().err
    assert shown.count("Error: ") == 1 and "Traceback" not in shown
    assert str(tmp_path / "model") in "".join(shown.split())


@pytest.mark.parametrize("command", [["eval"], ["generate", "--prompt", "x"]])
def test_a_model_without_some_weights_is_one_message_and_status_1(
    run: Path, tmp_path: Path, command: list[str]
) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    shown = refused(command[0], str(tmp_path), *command[1:]).replace(" ", "")
    assert f"{tmp_path}/modellacksweightsofitsmodel:model.norm.weight" in shown


def test_a_model_that_computes_nan_is_one_message_and_status_1(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "model" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    place = "NaN comes first in the output of model.norm, whose weight holds NaN"
    figures = tmp_path / "figures.json"
    for command in (["eval", "--json", str(figures)], ["generate", "--prompt", "x"]):
        shown = refused(command[0], str(tmp_path / "run"), *command[1:])
        assert shown.count("Error: the model computed ") == 1 and place in shown
        assert not figures.exists()
    assert call("diagnose", str(tmp_path / "run"), "--length", "100", "--json", str(figures)) == 1
    assert place in capsys.readouterr().out
    assert [record["head"] for record in json.loads(figures.read_text(), parse_constant=pytest.fail)] == [0, 1]


def test_a_text_of_ones_own_is_one_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my#text.md").write_text("text\n")  # a comment or a list to YAML
    found = configuration(None, None, "my#text.md", None, [])
    assert (found.data.text, found.output) == ("my#text.md", "runs/my#text")
    size = "gpu" if torch.cuda.is_available() else "cpu"
    assert found.model == load_config(presets()[f"quickstart_{size}"]).model
    (tmp_path / "inner").mkdir()
    for path in (".", "inner/.."):
        assert configuration(None, None, path, None, []).output == f"runs/{tmp_path.name}"
        assert configuration(None, None, path, None, ["output=mine"]).output == "mine"
    found = configuration("paper_340m", "kda", "my#text.md", None, [])  # the preset's own text is a data set
    assert (found.data.text, found.data.streaming, found.data.subset) == ("my#text.md", False, None)
    found = configuration("paper_340m", "kda", "my#text.md", "elsewhere", ["data={}"])
    assert (found.data.text, found.output, found.model["mixer"]) == ("python_stdlib", "elsewhere", "kda")


def test_a_single_file_is_trained_on_and_scored(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run.parent / "text" / "types.py"
    config = str(run.parent / "config.yaml")
    options = ("--text", str(text), "--output", str(tmp_path / "own"), "--set", "training.steps=1")
    assert call("train", config, *options, "--set", "data.max_validation_bytes=null") == 0
    assert call("eval", str(tmp_path / "own"), "--json", str(tmp_path / "held_out.json")) == 0
    held_out = json.loads((tmp_path / "held_out.json").read_text())["score"]["bytes"]
    assert held_out == pytest.approx(0.2 * text.stat().st_size, rel=0.02)
    assert call("eval", str(run), "--text", str(text), "--json", str(tmp_path / "all.json")) == 0
    assert json.loads((tmp_path / "all.json").read_text())["score"]["bytes"] == text.stat().st_size


def test_a_text_is_scored_where_the_training_text_is_not(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    written = tmp_path / "model" / "training.yaml"
    written.write_text(written.read_text().replace(str(run.parent / "text"), "/nowhere"))
    (tmp_path / "a.txt").write_text("some text\n" * 20)
    assert call("eval", str(tmp_path), "--text", str(tmp_path / "a.txt")) == 0
    captured = capsys.readouterr()
    assert "do without the training text: there is no file or folder '/nowhere'" in " ".join(captured.err.split())
    assert "gzip -9" in captured.out
    assert call("eval", str(tmp_path)) == 1


def test_a_run_goes_on_by_its_folder(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, tmp_path / "moved")
    assert call("train", str(tmp_path / "moved"), "--resume", "--set", "training.steps=10") == 0
    assert "going on from" in (shown := capsys.readouterr().err) and "moved/checkpoint-8" in "".join(shown.split())
    assert (tmp_path / "moved" / "checkpoint-10").is_dir()
    assert not (run / "checkpoint-10").exists()


def test_ctrl_c_saves_and_says_how_to_go_on(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    command = [sys.executable, "-m", "deltazoo", "train", str(run.parent / "config.yaml"), "--output", str(folder)]
    process = subprocess.Popen(
        [*command, "--set", "training.steps=4000", "--set", "training.save_every=4000"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells have background jobs ignore it
    )
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith("step"):
        assert line, "ended before it trained"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    saved = checkpoints(folder)[-1]
    assert f"saved in {saved}. To go on: deltazoo train '{folder}' --resume" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt(), 130), (TrainingInterrupted(signal.SIGTERM), 143)])
def test_an_interruption_has_the_status_of_its_signal(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stop: KeyboardInterrupt, status: int
) -> None:
    def train(*arguments: object, **options: object) -> None:
        raise stop

    monkeypatch.setattr("deltazoo.training.train", train)
    assert call("train", "quickstart_cpu", "--output", str(run.parent / "nothing")) == status
    assert "stopped before anything was saved" in capsys.readouterr().err


@pytest.mark.parametrize("preset", ["quickstart_gpu", str(presets()["quickstart_gpu"]), "quickstart_cpu"])
@pytest.mark.parametrize("gpu", [False, True])
def test_a_preset_for_gpus_says_that_there_is_none(
    preset: str, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltazoo.training.train", train)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert call("train", preset, "--output", str(tmp_path / "nothing")) == 130
    said = f"{preset} is a preset for GPUs, and there is none here" in capsys.readouterr().err
    assert said == (not gpu and preset != "quickstart_cpu")


def test_options_without_effect_are_refused(run: Path) -> None:
    assert "act on --text only" in refused("eval", str(run), "--max-bytes", "100")


def test_a_run_is_not_overwritten(run: Path) -> None:
    assert "--resume" in refused("train", str(run.parent / "config.yaml"))
    assert call("train", str(run.parent / "config.yaml"), "--resume") == 0


def test_the_traceback_is_shown_on_request() -> None:
    with pytest.raises(ValueError, match="no file or folder 'nowhere.yaml'"):
        main(["--traceback", "train", "nowhere.yaml"])


def test_a_mistyped_run_is_named(run: Path) -> None:
    mistyped = str(run) + "n"
    for arguments in ([mistyped, "--resume"], ["quickstart_cpu", "--resume", "--output", mistyped]):
        shown = refused("train", *arguments).replace(" ", "")  # the console breaks long lines
        assert f"didyoumean'{run}'?" in shown and mistyped in shown


def test_presets_are_found_by_name_and_by_path() -> None:
    assert find_config("quickstart_cpu") == presets()["quickstart_cpu"]
    path = presets()["paper_340m"]
    assert find_config(str(path)) == path


QUICK = [
    "--help",
    "list",
    "list --help",
    "show kda",
    "show --help",
    "train --help",
    "train nonsense",
    "train --text nowhere.txt",
    "train quickstart_cpu --set training.stepps=3",
    "train quickstart_cpu --set data.text=/nowhere",
    "train runs/nowhere --resume",
    "train quickstart_cpu --resume --output /nowhere",
    "check nowhere.py",
    "check kad",
    "check --help",
    "check --backend chunk",
    "train kda_340m",
    "train paper_340m --rule kad",
    "generate --help",
    "generate ./nowhere --prompt x",
    "eval --help",
    "eval ./nowhere",
    "eval ./nowhere --device tpu",
    "swap --help",
    "swap ./nowhere --rule kdaa",
    "distill --help",
    "distill ./nowhere --original ./nowhere --recipe swap_cpu --set align.stepps=1",
    "distill ./nowhere --original ./nowhere --recipe swap_cpu",
    "swap ./nowhere --rule kda --dry-run",
]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("train", "lm-eval", "list", "show")])
def test_several_processes_are_refused_at_once(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun does
    said = refused(command, "./nowhere")
    assert f"deltazoo {command} runs in one process, and WORLD_SIZE says that this is one of 2" in said


def test_help_lists_and_wrong_arguments_wait_for_no_torch() -> None:
    """Importing torch, transformers and peft takes ten seconds, too long before a message about a typo."""
    code = f"""
import sys
from deltazoo.cli import main

for line in {QUICK}:
    try:
        main(line.split())
    except SystemExit as stop:
        assert (stop.code == 0) == ("help" in line or line in ("list", "show kda")), (line, stop.code)
    heavy = {{"torch", "transformers", "peft", "datasets", "matplotlib", "accelerate"}} & set(sys.modules)
    assert not heavy, f"{{line}} imports {{heavy}}"
"""
    run_python(code)


def test_serve_without_its_extra_says_how_to_install_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for name in [name for name in sys.modules if name.startswith(("deltazoo.serving.", "fastapi."))]:
        monkeypatch.delitem(sys.modules, name)
    said = refused("serve", str(run))
    assert "deltazoo serve needs fastapi" in said and ": pip install '.[serve]' in a checkout" in said


def test_serve_refuses_bad_options(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen at 127.0.0.1, port {port}" in refused("serve", str(run), "--port", str(port))
    for key in ("", "a b", "a\n"):
        assert "the API key is sent in a header" in refused("serve", str(run), "--api-key", key)
    assert "--widths takes numbers from 1 on" in refused("serve", str(run), "--widths", "8,0")
    monkeypatch.setenv("DELTAZOO_API_KEY", "")
    assert "at least one: got 0 characters" in refused("serve", str(run))
