"""Compile the kernels of peers that tune themselves, hundreds of them, in parallel processes before a run.

The processes leave compiled kernels, but no tuning results: which kernel is fastest must be measured on an idle GPU.
The run itself tunes again, without waiting for the compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from benchmarks.operator_candidates import has_peer
from benchmarks.shapes import Shape

__all__ = ["warm_up_commands", "warm_up_peers"]


def warm_up_commands(shapes: list[Shape], ops: list[str], peers: list[str], device: str) -> list[list[str]]:
    """One command per operator, peer and set of head sizes; sizes that compile nothing new are reduced or left out."""
    options = ["--warm-up-only", "--no-ours", "--gates", "medium", "--measure", "forward,training"]
    return [
        [sys.executable, "-m", "deltazoo", "bench", "ops", "--out", os.devnull, "--device", device, *options]
        + ["--shapes", str(shape), "--ops", op, "--peers", peer]
        for op in ops
        if op != "softmax"
        for peer in peers
        if has_peer(op, peer)
        for shape in dict.fromkeys(_compiling(shape, peer) for shape in shapes)
    ]


def _compiling(shape: Shape, peer: str) -> Shape:
    """The smallest shape that compiles the kernels of a shape."""
    if peer.endswith("flashqla"):  # which kernels it takes depends on all sizes
        return shape
    # A batch of one may be compiled separately, as 1 is a constant of its own to Triton, and every batch may be to
    # TileLang; longer sequences are not.
    return replace(shape, B=shape.B if peer == "fla-tilelang" else min(shape.B, 2), T=min(shape.T, 1024))


def warm_up_peers(commands: list[list[str]], jobs: int, report: Callable[[str], None]) -> None:
    """Runs the commands, `jobs` at a time; one that fails is reported and otherwise left to the run itself."""
    package_root = str(Path(__file__).parents[3])
    search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search_path, "FLA_CACHE_RESULTS": "0"}

    def run(command: list[str]) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        return lines[0] if lines and done.returncode == 0 else " ".join([f"status {done.returncode}", *lines[-1:]])

    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed(pool.submit(run, command) for command in commands):
            report(f"warmed up  {future.result()}")
