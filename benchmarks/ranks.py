"""Losses of one model trained on one process and on several, step by step.

    python -m benchmarks.ranks --out benchmarks/results/ranks_cpu.json --device cpu
    python -m benchmarks.ranks --out benchmarks/results/ranks_h200.json --ways 1 2-cp

`deltazoo train` runs the quickstart of the machine in float32, with the same rows in every step, once for each way.
Rows are cut in the middle of documents, so states, convolutions and labels cross the cuts. Every way is a number of
processes and what they do: cp (context parallelism), fsdp (FSDP2), fsdp-cp (pairs share rows, all share parameters).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.common import Results, Row, options

SHARING = {"": (1, False), "cp": (None, False), "fsdp": (1, True), "fsdp-cp": (2, True)}
"""How many processes share a row (None: all), and whether parameters are sharded."""
LEARNING_RATE = 5e-4
"""A tenth of the quickstart's. With that rate, rounding grew to a difference of 0.01 in the loss within 50 steps, also
between one process and two under DDP."""


def losses(way: str, steps: int, device: str, folder: Path) -> Row:
    """Training losses of all steps."""
    processes, _, name = way.partition("-")
    together, sharded = SHARING[name]
    settings = {"steps": steps, "row_length": 512, "rows_per_batch": 2, "rows_per_step": 2, "precision": "fp32"}
    settings |= {"learning_rate": LEARNING_RATE, "log_every": 1, "evaluate_every": steps, "evaluation_rows": 8}
    settings |= {"save_every": steps, "context_parallel": int(processes) if together is None else together}
    settings |= {"fully_shard": str(sharded).lower()}
    preset = "quickstart_cpu" if device == "cpu" else "quickstart_gpu"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    command = [*torchrun, "-m", "deltazoo", "train", preset, "--output", str(folder)]
    subprocess.run([*command, *(f"--set=training.{key}={value}" for key, value in settings.items())], check=True)
    history = json.loads((folder / "result.json").read_text(encoding="utf-8"))["log_history"]
    return {"losses": [entry["loss"] for entry in history if "loss" in entry]}


def main() -> int:
    """Command line; exit status 1 if a training failed."""
    parser = options(__doc__)
    parser.add_argument("--ways", nargs="+", default=["1", "2", "2-cp", "4-cp", "4-fsdp-cp"])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    results = Results(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for way in arguments.ways:
            place = Path(folder) / way
            results.measure({"way": way}, partial(losses, way, arguments.steps, arguments.device, place))
    curves = {row["way"]: row["losses"] for row in results.rows if "losses" in row}
    for way, curve in curves.items():
        furthest = max(abs(a - b) for a, b in zip(curve, curves.get(arguments.ways[0], curve), strict=True))
        print(f"{way}: furthest from {arguments.ways[0]}: {furthest:.1e}")
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
