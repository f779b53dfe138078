"""The folder of a run: checked before a run begins or resumes; it records the configuration and the text.

Imports no torch, so that commands can check the folder at once.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deltazoo.training.checkpoint_files import checkpoints, write_whole
from deltazoo.training.config import RUN_CONFIG, DataConfig, as_mapping, load_config, save_config
from deltazoo.training.corpus import Corpus
from deltazoo.training.presets import nearest_run

RESULT, SCORES, SWAP, LOSS_PICTURE = "result.json", "scores.json", "swap.json", "loss.png"
_TEXT = "text.json"
# What a run writes before its first checkpoint, and the picture at its end.
_OF_A_TRAINING = (RUN_CONFIG, _TEXT, "tokenizer", LOSS_PICTURE)
_OF_A_CONVERSION = (RUN_CONFIG, _TEXT, SWAP, SCORES, LOSS_PICTURE)
# Keys that a resumed run may change: they do not affect the losses of earlier steps.
_FREE_TO_CHANGE = {"output", "training.steps", "training.save_every", "training.keep_checkpoints"}
_FREE_TO_CHANGE |= {"training.evaluate_every", "training.evaluation_rows"}
_FREE_TO_CHANGE |= {"training.rows_per_batch", "training.context_parallel", "training.fully_shard"}


def check_run(
    config: Any,
    folder: Path,
    resume: bool,
    load: Callable[[Path], Any] = load_config,
    stages: Sequence[str] = (),
) -> None:
    """Check that the folder is free for a new run, or holds this run to resume; writes nothing.

    A folder is free if no checkpoint and no result was saved in it, and nothing that the run would replace is there but
    what a run began with.

    Args:
        config: of the run.
        folder: of the run.
        resume: whether the folder must hold the run already.
        load: reads a configuration of this kind.
        stages: subfolders with checkpoints and results of their own.

    Raises:
        ValueError: the folder holds a run, or a file that the run would replace, and ``resume`` is false; it holds no
            run, or none whose configuration is known, and ``resume`` is true; the run in it has another configuration.
    """
    written = folder / RUN_CONFIG
    saved = has_saved(folder, stages)
    if not resume:
        if saved:
            raise ValueError(f"{folder} already holds a run: go on with --resume, or choose another output")
        began = written.is_file() and (folder / _TEXT).is_file()
        for name in () if began else _OF_A_CONVERSION if stages else _OF_A_TRAINING:
            if (folder / name).exists():
                raise ValueError(
                    f"{folder / name} is there already and of no run that began: remove it or choose another output"
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
    before, now = _flat(as_mapping(load(written))), _flat(as_mapping(config))
    changes = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and name not in _FREE_TO_CHANGE and not name.startswith("runtime.")
    ]
    if changes:
        raise ValueError(f"the run in {folder} began with another configuration: {'; '.join(changes)}")


def has_saved(folder: Path, stages: Sequence[str] = ()) -> bool:
    """Whether a run saved a checkpoint or a result in the folder or in the subfolders of its ``stages``."""
    return any(
        checkpoints(saved) or (saved / RESULT).exists() or (saved / "model").exists()
        for saved in [folder, *(folder / stage for stage in stages)]
    )


def begin_run(config: Any, folder: Path, corpus: Corpus) -> None:
    """Write the run's configuration and a digest of its text into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_config(config, folder / RUN_CONFIG)
    write_whole(folder / _TEXT, json.dumps(_facts(corpus)))


def refuse_other_text(corpus: Corpus, folder: Path, data: DataConfig) -> None:
    """Raise ValueError unless the text is the one that the run began with.

    Another Python version, for example, has another standard library.
    """
    written = folder / _TEXT
    # Only the beginning of a stream is known, and the Hub may change its order.
    if data.streaming or not written.is_file():
        return
    if json.loads(written.read_text(encoding="utf-8")) != _facts(corpus):
        raise ValueError(f"{corpus.description} is no longer the text that the run in {folder} began with")


def latest_checkpoint(folder: Path, steps: int) -> Path:
    """The checkpoint from which a run of ``steps`` steps resumes."""
    found = checkpoints(folder)
    if not found:
        raise ValueError(f"the run in {folder} is finished, and no checkpoint to go on from is left of it")
    reached = int(found[-1].name.removeprefix("checkpoint-"))
    if steps < reached:
        raise ValueError(f"the run in {folder} has reached step {reached}, and training.steps is {steps}: give more")
    return found[-1]


def _facts(corpus: Corpus) -> dict[str, str]:
    digest = hashlib.blake2b(digest_size=16)
    for document in [*corpus.train, *corpus.validation]:
        digest.update(document.text.encode("utf-8"))
    return {"text": corpus.description, "digest": digest.hexdigest()}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
