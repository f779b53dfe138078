"""Write folders and files whole or not at all; list, check and remove the checkpoints of a run."""

import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".unfinished-"


class SaveError(OSError):
    """Saving failed; earlier saves are intact."""


@contextmanager
def whole_or_not_at_all(target: Path) -> Iterator[Path]:
    """Yield a temporary path for the block to write a folder to; the folder replaces ``target`` when it is complete.

    A process killed inside the block leaves only a folder named ``.unfinished-...``, which the next attempt removes.
    An existing ``target`` stays until the new one is complete on disk.

    Raises:
        SaveError: writing failed, for example on a full disk; the message names the latest intact save.
    """
    staging = unfinished(target)
    replaced = target.with_name(f"{_UNFINISHED}old-{target.name}")
    if replaced.exists() and not target.exists():
        replaced.rename(target)  # killed between the two renames below: the old folder is complete
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
    """Write a small file whole or not at all: a killed process leaves no partial file that a resumed run would read."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def as_json(content: Any, **options: Any) -> str:
    """JSON text; null for NaN and infinity, which Python would write and JSON does not have.

    Args:
        content: of dicts, lists and plain values.
        options: of `json.dumps`.
    """
    return json.dumps(_finite(content), allow_nan=False, **options)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def unfinished(target: Path) -> Path:
    """The temporary path of the folder ``target`` while it is written."""
    return target.with_name(_UNFINISHED + target.name) / target.name


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        match = _CHECKPOINT.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return [found[step] for step in sorted(found)]


def refuse_damaged(checkpoint: Path) -> None:
    """Raise ValueError if a file of a checkpoint is missing or cut short; the message says what to do."""
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
                    pass  # opening it compares the header with the file's size
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
        except (SafetensorError, ValueError) as error:
            return f"{path} is damaged or incomplete ({error})"
    return None


def remove_oldest(folder: Path, keep: int) -> None:
    """Remove all but the latest ``keep`` checkpoints, and what interrupted saves left."""
    for path in [*checkpoints(folder)[:-keep], *folder.glob(f"{_UNFINISHED}checkpoint-*")]:
        shutil.rmtree(path, ignore_errors=True)


def is_write_failure(error: BaseException) -> bool:
    """Whether an exception means that the disk did not take the data.

    safetensors and torch.save wrap the operating system's error in types of their own.
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
    return f"{before[-1]} is whole: free some disk space and run the same command again with --resume"


def _flush(folder: Path) -> None:
    """Force the files to disk, so that after a power cut no renamed folder holds files without their contents."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
