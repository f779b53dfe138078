"""``deltazoo train`` on the texts that newcomers bring, and output that is true when it is copied."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from pathlib import Path

import pytest
from command_line import call, refused
from outside_rule import RULES, forget_rules
from tiny_runs import run_config, write_text_folder

from deltazoo.cli.training import _remark
from deltazoo.training import RunConfig, TrainingResult, save_config, train
from deltazoo.training.data import Corpus
from deltazoo.training.folder import held

TWO_STEPS = ("--set", "training.steps=2", "--set", "training.save_every=10", "--set", "training.row_length=256")


def words(size: int) -> str:
    draw = random.Random(0)
    known = ["".join(draw.choices("abcdefghijklm", k=draw.randint(2, 8))) for _ in range(300)]
    return " ".join(draw.choice(known) for _ in range(size // 5))[:size]


TEXTS = {
    "9 kB": words(9_000),
    "3 kB": words(3_000),
    "words again and again": "the cat sat " * 150_000,
    "lines again and again": "abc\n" * 5_000,
    "emoji": "".join(random.Random(0).choices("😀😃😄😁😆😅🤣😂🙂🙃😉😊😇🥰😍🤩😘", k=104_000)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_any_text_trains_and_says_which_vocabulary_it_yields(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my text.txt").write_text(TEXTS[name])
    assert call("train", "--text", "my text.txt", *TWO_STEPS) == 0
    captured = capsys.readouterr()
    assert ("the text yields a vocabulary of" in captured.err) == (name != "emoji"), "which has pairs enough"
    assert len(list(filter(None, captured.err.splitlines()))) <= 3, "vocabulary, held-out loss, passes over the text"
    generating = captured.out.splitlines()[-1]
    arguments = shlex.split(generating[generating.index("deltazoo") :])
    assert arguments[:3] == ["deltazoo", "generate", "runs/my text"]
    assert arguments[4] in TEXTS[name], "a prompt from the user's own text"
    assert call(*arguments[1:], "--max-new-tokens", "2") == 0


def test_a_text_shorter_than_a_row_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five thousand times one letter are a dozen tokens, which each row would hold twenty times."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a" * 5_000)
    assert call("train", "--text", "text.txt", *TWO_STEPS) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("Error: row_length is 256, and the training text, from text.txt, has ")
    assert call("train", "--text", "text.txt", *TWO_STEPS, "--set", "training.row_length=8") == 0


def test_three_repetitive_files_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for letter in "abc":
        (tmp_path / "texts" / f"{letter}.txt").write_text(f"{letter * 3}\n" * 500)
    assert call("train", "--text", "texts", *TWO_STEPS) == 0


def test_the_kind_of_tokenizer_may_be_set_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(words(3_000))
    assert call("train", "--text", "text.txt", "--set", "tokenizer.kind=byte", *TWO_STEPS) == 0
    assert json.loads((tmp_path / "runs/text/model/config.json").read_text())["vocab_size"] == 258


def test_a_text_too_short_to_hold_anything_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("hello")
    said = refused("train", "--text", "text.txt")
    assert "too little text to train on one part and hold another out: text.txt, 5 bytes; give more text" in said
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_folder(tmp_path_factory.mktemp("text") / "library", bytes_per_file=3000)


def saved(config: RunConfig, folder: Path) -> str:
    save_config(config, folder / "config.yaml")
    return str(folder / "config.yaml")


def test_what_comes_next_is_true_when_it_is_copied(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the file that registers the rule, the files that were read, and names that no line break cuts."""
    mixed = shutil.copytree(text, tmp_path / "a folder of texts")
    (mixed / "picture.png").write_bytes(b"\x89PNG\0\0")
    folder = tmp_path / ("runs of a name that is longer than a terminal is wide, " * 2)
    config = run_config(mixed, folder, model={"mixer": "trapezoid"}, training={"steps": 2, "save_every": 2})
    with forget_rules():
        command = ("train", saved(config, tmp_path), "--load", str(RULES / "trapezoid.py"))
        assert call(*command) == 0
        said = capsys.readouterr()
        facts = {line[:15].strip(): line[15:] for line in said.out.splitlines()}
        assert facts["text"].startswith(f"20 files of {mixed}, read ")
        assert Path(facts["loss curve"]).read_bytes().startswith(b"\x89PNG")
        for line in said.out.splitlines()[-2:]:
            assert shlex.split(line[15:])[-2:] == ["--load", str(RULES / "trapezoid.py")]
            assert call(*shlex.split(line[15:])[1:]) == 0
        capsys.readouterr()
        assert call(*command, "--resume") == 0
    said = capsys.readouterr()
    assert f"{folder} is finished already, with 2 steps, and nothing was trained. To go on: deltazoo train" in said.err
    assert "--load" in said.err and said.err.rstrip().endswith("--set training.steps=4")


def test_a_second_training_in_a_folder_is_refused_at_once(text: Path, tmp_path: Path) -> None:
    config = run_config(text, tmp_path / "run", training={"steps": 2, "save_every": 2})
    with held(tmp_path / "run"):
        for options in ([], ["--resume"]):
            assert "another process trains in" in refused("train", saved(config, tmp_path), *options)
        with pytest.raises(ValueError, match="another process trains in"):
            train(config)
    assert call("train", saved(config, tmp_path)) == 0


def test_where_nothing_can_be_written_is_said_before_the_text_is_read(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltazoo.training.run.read_corpus", pytest.fail)
    (tmp_path / "a file").write_text("of the user's")
    config = run_config(text, tmp_path / "a file" / "run")
    said = refused("train", saved(config, tmp_path))
    assert "cannot write into" in said and "Not a directory" in said and "Errno" not in said


def result(losses: dict[int, float], passes: float | None) -> TrainingResult:
    history = [{"step": step, "eval_loss": loss} for step, loss in losses.items()]
    corpus = Corpus([], ["text"], "text")
    return TrainingResult(Path("model"), corpus, history, 1, 1, 1.0, 1.0, "CPU", "fp32", passes)


def test_a_text_learnt_by_heart_is_one_closing_sentence(tmp_path: Path) -> None:
    for step in (200, 400, 600):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    falling, rising = {200: 3.0, 400: 2.0, 600: 1.9}, {200: 2.5, 300: 2.2, 400: 2.3, 600: 2.9}
    assert _remark(result(falling, 2.0), tmp_path) is None
    assert _remark(result(falling, None), tmp_path) is None
    often = "The training text was read 41 times: more text, or fewer steps, would do better"
    assert _remark(result(falling, 41.2), tmp_path) == often
    assert _remark(result(rising, 41.2), tmp_path) == (
        "The held-out loss has risen since step 300 (from 2.200 to 2.900), and the training text was read 41 times: "
        "more text, or --set training.steps=300, would do better; the best model that was kept is "
        f"{tmp_path / 'checkpoint-400'}"
    )
    assert str(_remark(result(rising, 1.0), tmp_path)).startswith("The held-out loss has risen since step 300 (from")
    assert _remark(result({200: 2.5, 400: 2.504}, 1.0), tmp_path) is None, "noise"
