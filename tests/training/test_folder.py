"""The folder of a run: held by one process, its checkpoints found, its files written whole or not at all."""

from __future__ import annotations

import errno
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import run_config
from torch.distributed import checkpoint as sharded_files

from deltazoo.diagnosis.pictures import draw_loss_curve
from deltazoo.training.config import DataConfig
from deltazoo.training.console import say
from deltazoo.training.data import Records, open_text
from deltazoo.training.folder import (
    SaveError,
    best_checkpoint,
    check_run,
    checkpoints,
    has_saved,
    held,
    latest_checkpoint,
    remove_oldest,
    unfinished,
    whole_or_not_at_all,
    write_json,
)
from deltazoo.training.tokens import byte_tokenizer


def write(target: Path, text: str) -> None:
    with whole_or_not_at_all(target) as staging:
        staging.mkdir()
        (staging / "file").write_text(text)


def test_the_folder_appears_complete_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "run" / "checkpoint-5"
    with whole_or_not_at_all(target) as staging:
        staging.mkdir()
        (staging / "file").write_text("new")
        assert not target.exists()
    assert (target / "file").read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint-5"]


def test_an_existing_folder_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "model", "old")
    write(tmp_path / "model", "new")
    assert (tmp_path / "model" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def write_text(folder: Path) -> None:
    (folder / "result.json").write_text("x" * 10_000)


def write_safetensors(folder: Path) -> None:
    save_file({"x": torch.zeros(10_000)}, folder / "model.safetensors")


def write_optimizer(folder: Path) -> None:
    torch.save({"x": torch.zeros(10_000)}, folder / "optimizer.pt")


def write_sharded_optimizer(folder: Path) -> None:
    sharded_files.save({"x": torch.zeros(10_000)}, checkpoint_id=folder / "optimizer")


def write_tokenizer(folder: Path) -> None:
    byte_tokenizer().save_pretrained(folder)


def write_dataset(folder: Path) -> None:
    data = DataConfig(text=str(folder.parent / "texts.jsonl"), text_field="text")
    source = open_text(data)
    assert isinstance(source, Records)
    source._options["cache_dir"] = str(folder / "cache")
    source.open()


def write_picture(folder: Path) -> None:
    draw_loss_curve([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], folder / "loss.png", "a run", 1000)


WRITERS = [write_text, write_safetensors, write_optimizer, write_sharded_optimizer, write_tokenizer, write_dataset]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fill", [*WRITERS, write_picture])
def test_a_full_disk_is_one_sentence_whatever_library_says_it(fill: Callable[[Path], None], tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run / "checkpoint-5", "old")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": "word " * 200}) + "\n" for _ in range(50)))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, unlimited[1]))
    try:
        with pytest.raises(SaveError) as caught, held(run):
            fill(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    said = f"{run / 'checkpoint-5'} is whole: free some disk space and run the same command again with --resume"
    assert re.fullmatch(
        rf"could not save into {re.escape(str(run))}: (File too large|No space left on device)\. {re.escape(said)}",
        str(caught.value),
    )
    assert (run / "checkpoint-5" / "file").read_text() == "old"


def test_a_full_disk_leaves_what_was_there_and_says_so(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-5", "old")
    (tmp_path / "checkpoint-999").mkdir()
    expected = pytest.raises(SaveError, match=r"No space left.*checkpoint-5 is whole.*--resume")
    with expected, held(tmp_path), whole_or_not_at_all(tmp_path / "checkpoint-10") as staging:
        staging.mkdir()
        (staging / "file").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-5", "checkpoint-999"]
    assert (tmp_path / "checkpoint-5" / "file").read_text() == "old"


def test_a_full_disk_at_the_first_save_says_that_nothing_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    expected = pytest.raises(SaveError, match="Nothing had been saved before")
    with expected, held(folder), whole_or_not_at_all(folder / "model"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_another_process_does_not_get_the_folder(tmp_path: Path) -> None:
    """Whether it begins, resumes or looks, and until the process that holds the folder is gone, however it goes."""
    run = tmp_path / "run"
    config = run_config(tmp_path, run)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    refused = f"another process trains in {run}: wait for its end, or choose another output"
    for look in (lambda: check_run(config, False), lambda: check_run(config, True), held(run).__enter__):
        with pytest.raises(ValueError, match=re.escape(refused)):
            look()
    holder.kill()
    holder.wait()
    check_run(config, resume=False)
    with held(run):
        pass
    assert not run.exists() or not any(run.iterdir())


HOLD = """
import sys, time
from pathlib import Path
from deltazoo.training.folder import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_other_processes_of_the_same_run_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(tmp_path / "run"):
        monkeypatch.setenv("RANK", "1")
        say("going on")
        assert capsys.readouterr().err == "", "the first process says it"
        check_run(run_config(tmp_path, tmp_path / "run"), resume=False)
        with held(tmp_path / "run"):
            pass
        monkeypatch.setenv("RANK", "0")
        assert (tmp_path / "run").is_dir()


def test_a_file_is_no_folder_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    for folder in (tmp_path / "run", tmp_path / "run" / "inner"):
        with pytest.raises(ValueError, match=f"cannot write into {folder}: "), held(folder):
            pass
        with pytest.raises(ValueError, match=f"cannot write into {folder}: Not a directory"):
            check_run(run_config(tmp_path, folder), resume=False)


def test_a_folder_for_a_run_is_tried_without_a_trace(tmp_path: Path) -> None:
    check_run(run_config(tmp_path, tmp_path / "runs" / "mine"), resume=False)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path / "a folder", {})
    assert [path.name for path in tmp_path.iterdir()] == ["a folder"]


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("other/file")
    write_json(tmp_path / "link", {"a": 1})
    assert (tmp_path / "link").is_symlink() and json.loads((tmp_path / "other" / "file").read_text()) == {"a": 1}


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_holds_runs_all_the_same(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(code, "there are no locks")))
    with held(tmp_path / "run"):
        (tmp_path / "run" / "model.safetensors").touch()
    with held(tmp_path / "other"):
        pass
    assert not (tmp_path / "other").exists()
    check_run(run_config(tmp_path, tmp_path / "third"), False)


def test_the_best_checkpoint_outlives_later_ones(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        write(tmp_path / f"checkpoint-{step}", str(step))
    history = [{"step": step, "eval_loss": loss} for step, loss in ((1, 0.1), (2, 3.0), (4, 2.5), (6, 2.6), (8, 2.9))]
    assert best_checkpoint(tmp_path, history) == tmp_path / "checkpoint-4"
    remove_oldest(tmp_path, 1, history)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-8"]
    assert best_checkpoint(tmp_path, []) is None


def test_an_empty_checkpoint_counts_for_nothing(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-5", "old")
    (tmp_path / "checkpoint-999").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-5"]
    assert latest_checkpoint(tmp_path, steps=10) == tmp_path / "checkpoint-5"
    (tmp_path / "other" / "checkpoint-999").mkdir(parents=True)
    assert not has_saved(tmp_path / "other")


def test_other_errors_pass_through_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), whole_or_not_at_all(tmp_path / "model"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_save_left_is_no_checkpoint_and_is_cleared_away(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-5", "old")
    left = unfinished(tmp_path / "checkpoint-10")
    left.mkdir(parents=True)
    (left / "file").write_text("half")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-5"]
    write(tmp_path / "checkpoint-10", "new")
    assert (tmp_path / "checkpoint-10" / "file").read_text() == "new"
    assert not left.exists()


def test_killed_between_the_two_renames_the_old_folder_comes_back(tmp_path: Path) -> None:
    write(tmp_path / "model", "old")
    (tmp_path / "model").rename(tmp_path / ".unfinished-old-model")
    with pytest.raises(ZeroDivisionError), whole_or_not_at_all(tmp_path / "model"):
        raise ZeroDivisionError
    assert (tmp_path / "model" / "file").read_text() == "old"


def test_checkpoints_are_ordered_by_step_and_the_oldest_removed(tmp_path: Path) -> None:
    for step in (1000, 5, 40, 200):
        write(tmp_path / f"checkpoint-{step}", str(step))
    write(tmp_path / "checkpoint-final", "not a step")
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{n}" for n in (5, 40, 200, 1000)]
    remove_oldest(tmp_path, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-200", "checkpoint-1000"]


def test_json_holds_no_nan(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    content = {"a": [1, nan, (inf, -inf)], "b": {"c": nan, "d": "nan"}, "e": True, "f": 0.5}
    write_json(tmp_path / "some.json", content)
    found = json.loads((tmp_path / "some.json").read_text())
    assert found == {
        "a": [1, None, [None, None]],
        "b": {"c": None, "d": "nan"},
        "e": True,
        "f": 0.5,
    }
