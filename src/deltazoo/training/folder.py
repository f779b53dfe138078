"""The folder of a run: one process holds it, it is checked before a run, and its files are written whole or not at all.

This module imports no torch, so that commands can check the folder at once.
"""

import errno
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from filelock import FileLock, Timeout
from pydantic_core import to_json
from safetensors import SafetensorError, safe_open

from deltazoo.training.config import (
    RUN_CONFIG,
    STAGES,
    DataConfig,
    Recipe,
    as_mapping,
    load_as,
    save_config,
    write_whole,
)
from deltazoo.training.data import Corpus
from deltazoo.training.loading import nearest_run

RESULT, SCORES, SWAP, LOSS_PICTURE = "result.json", "scores.json", "swap.json", "loss.png"
_TEXT, _LOCK = "text.json", ".lock"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_UNFINISHED = ".unfinished-"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # errors of file systems without locks
# Names of the files that a run writes before its first checkpoint, and of the picture at its end.
_OF_A_TRAINING = (RUN_CONFIG, _TEXT, "tokenizer", LOSS_PICTURE)
_OF_A_DISTILLATION = (RUN_CONFIG, _TEXT, SWAP, SCORES, LOSS_PICTURE)
# Keys that a resumed run may change: they do not affect the losses of earlier steps.
_FREE_TO_CHANGE = {"output", "training.steps", "training.save_every", "training.keep_checkpoints"}
_FREE_TO_CHANGE |= {"training.evaluate_every", "training.evaluation_rows"}
_FREE_TO_CHANGE |= {"training.rows_per_batch", "training.context_parallel", "training.fully_shard"}
_DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# safetensors, tokenizers, torch and datasets raise errors of their own, in the system's words or in these.
_SAYS_FULL = re.compile("|".join([*map(os.strerror, _DISK_IS_FULL), "file write failed", "unexpected pos"]))


class SaveError(OSError):
    """The disk is full; earlier saves are intact."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A context that makes the folder of a run and holds it; the operating system releases it when the process ends.

    Of several processes of a run the first holds it. A folder in which nothing was written is removed again.

    Raises:
        ValueError: another process holds it, or nothing can be written there.
        SaveError: the disk became full inside; the message names the latest intact save.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
    except OSError as error:
        raise ValueError(f"cannot write into {folder}: {error.strerror}") from error
    try:
        with saving_into(folder):
            yield
    finally:
        if lock is not None:
            (folder / _LOCK).unlink(missing_ok=True)
            lock.release()
        for path in new:
            with suppress(OSError):
                path.rmdir()


@contextmanager
def saving_into(folder: Path) -> Iterator[None]:
    """A context in which a full disk is a `SaveError` that names the latest intact save, whichever library noticed."""
    try:
        yield
    except BaseException as error:  # the error of torch's sharded checkpoints is one
        said = _full_disk(error)
        if said is None:
            raise
        raise SaveError(f"could not save into {folder}: {said}. {_what_is_left(folder)}") from error


def _lock(folder: Path) -> FileLock | None:
    """A lock on the folder, acquired; None in all processes of a run but the first, and without locks there.

    Raises:
        ValueError: another process holds it.
    """
    if os.environ.get("RANK", "0") != "0":
        return None
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"another process trains in {folder}: wait for its end, or choose another output") from error
    except (OSError, NotImplementedError) as error:  # filelock raises the second for ENOSYS, or has a substitute
        if getattr(error, "errno", errno.ENOSYS) not in _WITHOUT_LOCKS:
            raise
        (folder / _LOCK).unlink(missing_ok=True)
        return None
    return lock


def _full_disk(error: BaseException | None) -> str | None:
    """The words in which an error, or its cause, says that the disk is full; None: it is another error."""
    while error is not None:
        if isinstance(error, SaveError):
            return None
        if found := _SAYS_FULL.search(str(error)):
            return found[0] if found[0][0].isupper() else os.strerror(errno.ENOSPC)
        error = error.__cause__ or error.__context__
    return None


def _what_is_left(folder: Path) -> str:
    saved = [path for part in (folder, *folder.glob("[!.]*/")) for path in checkpoints(part)]
    before = [*sorted(saved, key=lambda path: path.stat().st_mtime), *folder.glob("model/")]
    if not before:
        return "Nothing had been saved before"
    return f"{before[-1]} is whole: free some disk space and run the same command again with --resume"


def check_writable(folder: Path) -> None:
    """Raise ValueError unless a folder, or the nearest of its parents that exists, can be written into; makes none."""
    try:
        TemporaryFile(dir=next(path for path in (folder, *folder.parents) if path.exists())).close()
    except OSError as error:
        raise ValueError(f"cannot write into {folder}: {error.strerror}") from error


def check_run(config: Any, resume: bool) -> None:
    """Check that the folder can be written into and is free for a new run, or holds this run to resume.

    A folder is free if no checkpoint and no result was saved in it, and it has no file that the run would replace
    except those with which a run began.

    Args:
        config: configuration of the run, a `RunConfig` or a `Recipe`.
        resume: whether the folder must hold the run already.

    Raises:
        ValueError: nothing can be written there, or another process trains there; the folder holds a run, or a file
            that the run would replace, and ``resume`` is false; it holds no run, or none whose configuration is known,
            and ``resume`` is true; the run in it has another configuration.
    """
    folder, stages = Path(config.output), STAGES if isinstance(config, Recipe) else ()
    written, saved = folder / RUN_CONFIG, has_saved(folder, stages)
    if saved or not resume:
        check_writable(folder)
    if (folder / _LOCK).is_file() and (lock := _lock(folder)):  # a killed run may have left it
        lock.release()
    if not resume:
        if saved:
            raise ValueError(f"{folder} already holds a run: go on with --resume, or choose another output")
        began = written.is_file() and (folder / _TEXT).is_file()
        for name in () if began else _OF_A_DISTILLATION if stages else _OF_A_TRAINING:
            if (folder / name).exists():
                raise ValueError(
                    f"{folder / name} exists already and belongs to no run: remove it or choose another output"
                )
        return
    if saved and not written.is_file():
        raise ValueError(
            f"{folder} cannot be resumed: {written}, the configuration that its run began with, is missing"
        )
    if not saved:
        hint = "" if folder.is_dir() else nearest_run(folder)
        raise ValueError(
            f"there is nothing to resume in {folder}: no checkpoint was saved there{hint or '. Leave out --resume'}"
        )
    before, now = _flat(as_mapping(load_as(type(config), written))), _flat(as_mapping(config))
    changes = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and name not in _FREE_TO_CHANGE and not name.startswith("runtime.")
    ]
    if changes:
        raise ValueError(f"the run in {folder} began with another configuration: {'; '.join(changes)}")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def has_saved(folder: Path, stages: Sequence[str] = ()) -> bool:
    """Whether a run saved a checkpoint or a result in the folder or in the subfolders of its ``stages``."""
    return any(
        checkpoints(saved) or (saved / RESULT).exists() or (saved / "model").exists()
        for saved in [folder, *(folder / stage for stage in stages)]
    )


def begin_run(config: Any, folder: Path, corpus: Corpus) -> None:
    """Write the run's configuration and a digest of its text into the folder."""
    save_config(config, folder / RUN_CONFIG)
    write_json(folder / _TEXT, {"text": corpus.description, "digest": corpus.digest})


def refuse_other_text(corpus: Corpus, folder: Path, data: DataConfig) -> None:
    """Raise ValueError unless the text is the one with which the run began.

    Another Python version, for example, has another standard library. Of a stream only the beginning is known, and the
    Hub may change its order.
    """
    written = folder / _TEXT
    if data.streaming or not written.is_file():
        return
    if json.loads(written.read_text(encoding="utf-8"))["digest"] != corpus.digest:
        raise ValueError(f"{corpus.description} is no longer the text that the run in {folder} began with")


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first; an empty folder is none."""
    named = [path for path in folder.glob("checkpoint-*") if _CHECKPOINT.fullmatch(path.name)]
    return sorted((path for path in named if path.is_dir() and any(path.iterdir())), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def latest_checkpoint(folder: Path, steps: int) -> Path:
    """The checkpoint from which a run of ``steps`` steps resumes.

    Raises:
        ValueError: no checkpoint is left, or the latest is beyond ``steps``.
    """
    found = checkpoints(folder)
    if not found:
        raise ValueError(f"the run in {folder} is finished, and no checkpoint to go on from is left of it")
    if steps < (reached := step_of(found[-1])):
        raise ValueError(f"the run in {folder} has reached step {reached}, and training.steps is {steps}: give more")
    return found[-1]


def best_checkpoint(folder: Path, history: Sequence[Mapping[str, Any]]) -> Path | None:
    """The checkpoint with the lowest held-out loss, among those whose step has one in the Trainer's log history."""
    losses = {f"checkpoint-{entry['step']}": entry["eval_loss"] for entry in history if "eval_loss" in entry}
    known = [path for path in checkpoints(folder) if path.name in losses]
    return min(known, key=lambda path: losses[path.name], default=None)


def remove_oldest(folder: Path, keep: int, history: Sequence[Mapping[str, Any]] = ()) -> None:
    """Remove all but the latest ``keep`` checkpoints and the best one, and remains of interrupted saves."""
    best = best_checkpoint(folder, history)
    for path in [*checkpoints(folder)[:-keep], *folder.glob(f"{_UNFINISHED}checkpoint-*")]:
        if path != best:
            shutil.rmtree(path, ignore_errors=True)


def refuse_damaged(checkpoint: Path) -> None:
    """Raise ValueError if a file of a checkpoint is missing or cut short; the message says what to do."""
    if damaged := _damage(checkpoint):
        before = [path for path in checkpoints(checkpoint.parent) if path != checkpoint]
        advice = f"go on from {before[-1].name}" if before else "start over"
        raise ValueError(f"{damaged}: remove the folder {checkpoint} to {advice}")


def _damage(checkpoint: Path) -> str | None:
    for needed in ("trainer_state.json", "optimizer*", "scheduler.pt", "*.safetensors"):
        if not any(checkpoint.glob(needed)):
            return f"{checkpoint} holds no {needed}"
    for path in sorted(checkpoint.iterdir()):
        if path.suffix in (".pt", ".pth") and not zipfile.is_zipfile(path):  # torch.save writes zip files
            return f"{path} is damaged or incomplete"
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="np"):
                    pass  # opening it compares the header with the file's size
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
        except (SafetensorError, ValueError) as error:
            return f"{path} is damaged or incomplete ({error})"
    return None


@contextmanager
def whole_or_not_at_all(target: Path) -> Iterator[Path]:
    """A context with a temporary path for a folder, which replaces ``target`` when it is complete.

    A process killed inside the context leaves only a folder named ``.unfinished-...``, which the next attempt removes.
    An existing ``target`` stays until the new one is complete on disk.
    """
    staging = unfinished(target)
    replaced = target.with_name(f"{_UNFINISHED}old-{target.name}")
    if replaced.exists() and not target.exists():
        replaced.rename(target)  # after a kill between the two renames below the old folder is complete
    shutil.rmtree(staging.parent, ignore_errors=True)
    try:
        staging.parent.mkdir(parents=True)
        yield staging
        for path in filter(Path.is_file, staging.rglob("*")):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # without it a power cut might leave a renamed folder of empty files
    except BaseException:
        shutil.rmtree(staging.parent, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    staging.rename(target)
    staging.parent.rmdir()
    shutil.rmtree(replaced, ignore_errors=True)


def unfinished(target: Path) -> Path:
    """The temporary path of the folder ``target`` while it is written."""
    return target.with_name(_UNFINISHED + target.name) / target.name


def write_json(path: Path, content: Any) -> None:
    """Write dicts, lists and plain values whole or not at all; null for NaN and infinity, which JSON does not have."""
    write_whole(path, to_json(content, indent=1, inf_nan_mode="null").decode() + "\n")
