"""Train one model on one and on several processes, and compare the losses of every step.

    python scripts/train_on_ranks.py --out benchmarks/results/ranks_cpu.json
    python scripts/train_on_ranks.py --out benchmarks/results/ranks_h200.json --ways 1 2-cp

`deltazoo train` runs the quickstart of the machine in float32, with the same rows in every step, once for each way.
Rows are cut in the middle of documents, so states, convolutions and labels cross the cuts. Every way is a number of
processes and what they do: cp (context parallelism), fsdp (FSDP2), fsdp-cp (pairs share rows, all share parameters).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.provenance import describe_run
from benchmarks.result_files import write_results

OPTIONS = {"": (1, False), "cp": (None, False), "fsdp": (1, True), "fsdp-cp": (2, True)}
"""Context parallelism (None: of all processes), and whether parameters are sharded."""
LEARNING_RATE = 5e-4
"""A tenth of the quickstart's. With that rate, rounding grew to a difference of 0.01 in the loss within 50 steps, also
between one process and two under DDP."""
WAYS = ("1", "2", "2-cp", "4-cp", "4-fsdp-cp")


def losses(way: str, steps: int, folder: Path) -> list[float]:
    """Training losses of all steps."""
    processes, _, name = way.partition("-")
    shared, sharded = OPTIONS[name]
    settings = {
        "steps": steps,
        "row_length": 512,
        "rows_per_batch": 2,
        "rows_per_step": 2,
        "precision": "fp32",
        "learning_rate": LEARNING_RATE,
        "log_every": 1,
        "evaluate_every": steps,
        "evaluation_rows": 8,
        "save_every": steps,
        "context_parallel": int(processes) if shared is None else shared,
        "fully_shard": str(sharded).lower(),
    }
    preset = "quickstart_gpu" if torch.cuda.is_available() else "quickstart_cpu"
    command = [sys.executable, "-m", "deltazoo", "train", preset, "--gpus", processes, "--output", str(folder)]
    subprocess.run([*command, *(f"--set=training.{key}={value}" for key, value in settings.items())], check=True)
    history = json.loads((folder / "result.json").read_text(encoding="utf-8"))["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def main(arguments: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = describe_run(device=device, commit=arguments.commit, command=sys.argv)
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in arguments.ways:
            curves[way] = losses(way, arguments.steps, Path(folder) / way)
            write_results(arguments.out, run, losses=curves)
    first = curves[arguments.ways[0]]
    for way, curve in curves.items():
        furthest = max(abs(a - b) for a, b in zip(curve, first, strict=True))
        print(f"{way:10} last loss {curve[-1]:.6f}, furthest from {arguments.ways[0]}: {furthest:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=WAYS, help="the first is what the others are compared with")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--commit", help="of the code, where git is missing")
    main(parser.parse_args())
