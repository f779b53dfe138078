"""A training run small enough for a test: a few files of the standard library, a model of a few thousand parameters."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path
from typing import Any

from deltazoo.generation.cache import CACHE
from deltazoo.training.config import RunConfig, from_mapping

FILES = (
    "abc.py bisect.py contextlib.py copy.py dis.py fnmatch.py functools.py heapq.py keyword.py opcode.py operator.py "
    "pprint.py queue.py sched.py shlex.py statistics.py string.py textwrap.py token.py types.py"
)


def write_text_folder(folder: Path, bytes_per_file: int | None = None) -> Path:
    """Twenty files of real text, 300 kB unless cut; ``run_config`` holds a few of them out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    folder.mkdir(parents=True)
    for name in FILES.split():
        (folder / name).write_bytes((library / name).read_bytes()[:bytes_per_file])
    return folder


def run_config(text: Path, output: Path, **changes: dict[str, Any]) -> RunConfig:
    """A complete configuration; ``changes`` are sections whose keys replace or extend these."""
    values: dict[str, Any] = {
        "output": str(output),
        "data": {"text": str(text), "validation_fraction": 0.2, "max_validation_bytes": 3000},
        "tokenizer": {"kind": "bpe", "vocab_size": 320},
        "model": {"mixer": "gated_deltanet", "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "head_dim": 16}
        | {"expand_v": 1, "intermediate_size": 48, "tie_word_embeddings": True},
        "training": {"steps": 8, "row_length": 48, "rows_per_batch": 2, "learning_rate": 3e-3, "log_every": 1}
        | {"evaluate_every": 4, "evaluation_rows": 2, "save_every": 4, "warmup": 0.1, "precision": "fp32"},
    }
    for section, keys in changes.items():
        values[section] = {**values[section], **keys}
    return from_mapping(RunConfig, values)


COMPARED = ("loss", "grad_norm", "eval_loss", "diagnose_gain_max", "diagnose_state_norm_max")


def losses(config: RunConfig, resume: bool = False) -> dict[str, list[float]]:
    """Run it; the history of what ought to be the same however many processes there are."""
    from deltazoo.training import train

    history = train(config, resume=resume).log_history
    return {key: [entry[key] for entry in history if key in entry] for key in COMPARED}


def for_the_installed_version(source: str) -> str:
    """Python source of a page, where the argument `cache` has the name that the newest transformers uses."""
    return re.sub(r"\bcache=|(?<=\.)cache\b", lambda name: name[0].replace("cache", CACHE), source)


def run_python(source: str, folder: Path, result: str) -> Any:
    """Run Python source in a folder, on the CPU; the value of an expression afterwards."""
    os.chdir(folder)
    namespace: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(source, "recipe", "exec"), namespace)
    return eval(result, namespace)
