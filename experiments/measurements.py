"""Measurements without training, kept as JSON beside the results of the configurations."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deltazoo.training.checkpoint_files import as_json
from experiments.complexity import measure_complexity
from experiments.lab_records import Environment
from experiments.numerics import measure_numerics

__all__ = ["MEASUREMENTS", "read_measurements", "run_measurements"]

MEASUREMENTS = ("numerics", "complexity")
"""Names of the files, without `.json`."""


def run_measurements(
    folder: Path, suite: str, environment: Environment, device: str, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure what has no file in `folder` yet: numerics, with the full suite complexity too; nothing with
    `family` and `causes`.

    Returns:
        Name -> what was measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = torch.device(device).type == "cuda"
    wanted: dict[str, Callable[[], dict[str, Any]]] = {}
    if suite not in ("family", "causes"):
        wanted["numerics"] = lambda: measure_numerics(device)
    if suite == "full":
        wanted["complexity"] = lambda: measure_complexity(device, longest=131072 if on_gpu else 16384)
    for name, measure in wanted.items():
        path = folder / f"{name}.json"
        if not path.exists():
            report(f"measuring {name}")
            content = {"environment": asdict(environment), **measure()}
            path.write_text(as_json(content, indent=1) + "\n", encoding="utf-8")
    return read_measurements(folder)


def read_measurements(folder: Path, prefix: str = "") -> dict[str, Any]:
    """The measurements that a folder holds, from files `<prefix><name>.json`.

    Raises:
        ValueError: a file that is not one of ours.
    """
    found = {}
    for name in MEASUREMENTS:
        path = folder / f"{prefix}{name}.json"
        if path.exists():
            try:
                found[name] = json.loads(path.read_text(encoding="utf-8"))
                Environment(**found[name]["environment"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is not a measurement of this version of the lab: {error}") from error
    return found
