"""A folder is written whole or not at all."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from deltazoo.training.folder import SaveError, as_json, checkpoints, remove_oldest, unfinished, whole_or_not_at_all


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


def test_a_full_disk_leaves_what_was_there_and_says_so(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-5", "old")
    expected = pytest.raises(SaveError, match=r"No space left.*checkpoint-5 is whole.*--resume")
    with expected, whole_or_not_at_all(tmp_path / "checkpoint-10") as staging:
        staging.mkdir()
        (staging / "file").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert (tmp_path / "checkpoint-5" / "file").read_text() == "old"


def test_a_full_disk_at_the_first_save_says_that_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="Nothing had been saved before"), whole_or_not_at_all(tmp_path / "model"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


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


def test_json_holds_no_nan() -> None:
    nan, inf = float("nan"), float("inf")
    text = as_json({"a": [1, nan, (inf, -inf)], "b": {"c": nan, "d": "nan"}, "e": True, "f": 0.5}, indent=1)
    assert json.loads(text) == {"a": [1, None, [None, None]], "b": {"c": None, "d": "nan"}, "e": True, "f": 0.5}
