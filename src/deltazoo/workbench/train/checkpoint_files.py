"""Checkpoints that exist whole or not at all."""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".unfinished-"


class SaveError(OSError):
    """Saving failed; what was saved before is untouched."""


@contextmanager
def whole_or_not_at_all(target: Path) -> Iterator[Path]:
    """Yield the path at which the block writes the folder that takes the place of ``target`` once it is complete.

    A process killed inside the block leaves only a folder named ``.unfinished-...``, which the next attempt removes.
    An existing ``target`` stays until the new one is complete on disk.

    Raises:
        SaveError: writing failed, for example on a full disk; names what is still there.
    """
    staging = unfinished(target)
    replaced = target.with_name(f"{_UNFINISHED}old-{target.name}")
    if replaced.exists() and not target.exists():
        replaced.rename(target)  # killed between the two renames below: the old one is whole
    shutil.rmtree(staging.parent, ignore_errors=True)
    try:
        staging.parent.mkdir(parents=True)
        yield staging
        _flush(staging)
    except BaseException as error:
        shutil.rmtree(staging.parent, ignore_errors=True)
        if not is_write_failure(error):
            raise
        raise SaveError(f"could not save {target}: {error}. {_what_is_left(target)}") from error
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    staging.rename(target)
    staging.parent.rmdir()
    shutil.rmtree(replaced, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all: a killed process leaves no half of it that a resumed run would trust."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def unfinished(target: Path) -> Path:
    """Where the folder ``target`` is written before it is complete."""
    return target.with_name(_UNFINISHED + target.name) / target.name


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        match = _CHECKPOINT.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return [found[step] for step in sorted(found)]


def refuse_damaged(checkpoint: Path) -> None:
    """Raise ValueError, naming the file and the way out, if a file of a checkpoint is missing or cut short."""
    damaged = _damage(checkpoint)
    if damaged is None:
        return
    before = [path for path in checkpoints(checkpoint.parent) if path != checkpoint]
    advice = f"go on from {before[-1].name}" if before else "start over"
    raise ValueError(f"{damaged}: remove the folder {checkpoint} to {advice}")


def _damage(checkpoint: Path) -> str | None:
    for needed in ("trainer_state.json", "optimizer*", "scheduler.pt", "*.safetensors"):
        if not any(checkpoint.glob(needed)):
            return f"{checkpoint} holds no {needed}"
    for path in sorted(checkpoint.iterdir()):
        if path.suffix in (".pt", ".pth") and not zipfile.is_zipfile(path):  # what torch.save writes
            return f"{path} is damaged or incomplete"
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="np"):
                    pass  # opening compares the header with the size of the file
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
        except (SafetensorError, ValueError) as error:
            return f"{path} is damaged or incomplete ({error})"
    return None


def remove_oldest(folder: Path, keep: int) -> None:
    """Leave the latest ``keep`` checkpoints, and nothing of saves that were interrupted."""
    for path in [*checkpoints(folder)[:-keep], *folder.glob(f"{_UNFINISHED}checkpoint-*")]:
        shutil.rmtree(path, ignore_errors=True)


def is_write_failure(error: BaseException) -> bool:
    """Whether an exception says that the disk did not take the data.

    safetensors and torch.save wrap the operating system's answer in errors of their own.
    """
    return (
        isinstance(error, OSError)
        or type(error).__name__ == "SafetensorError"
        or (
            isinstance(error, RuntimeError)
            and ("PytorchStreamWriter" in str(error) or "file write failed" in str(error))
        )
    )


def _what_is_left(target: Path) -> str:
    before = [path for path in [*checkpoints(target.parent), target] if path.is_dir()]
    if not before:
        return "Nothing had been saved before."
    return f"{before[-1]} is whole: make room and run the same command again with --resume"


def _flush(folder: Path) -> None:
    """Force the files to disk, so that the rename cannot survive a power cut that their contents do not."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
