"""Time of the first training step in a fresh process, and the kernels that it and other sizes compile.

The processes use a kernel cache of their own (`TRITON_CACHE_DIR`); compiled kernels are counted there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.inputs import make_inputs
from benchmarks.operator_candidates import candidates_for, our_label
from benchmarks.operator_options import gates_of
from benchmarks.operator_results import OperatorRow
from benchmarks.shapes import Shape
from benchmarks.timing import timer_for

__all__ = ["cold_start_rows"]

FIRST = Shape(2, 2048, 16, 128, 128)
_TIMEOUT_S = 300


def _other_sizes(first: Shape) -> list[Shape]:
    """Lengths on and off the chunk grid, more and fewer sequences, few heads and many, odd and even."""
    B, T, H = first.B, first.T, first.H
    sizes = [
        (1, 2 * T, H),
        (B + 1, T // 2 + 1, H),
        (B, 65, H),
        (1, 1, H),
        (4 * B, T, max(H // 2, 1)),
        (B, T, max(3 * H // 8, 1)),
        (1, 4 * T + 17, 1),
    ]
    return [replace(first, B=B, T=T, H=H) for B, T, H in sizes]


def cold_start_rows(op: str, *, backend: str, device: str, first: Shape = FIRST) -> list[OperatorRow]:
    """First-call seconds with an empty and with a filled kernel cache, and the kernels that were compiled."""
    gates = "medium" if "medium" in gates_of(op) else "none"
    row = OperatorRow(str(first), op, gates, our_label(backend, None), measure="cold_first_call_s")
    measures = ("cold_first_call_s", "kernels", "new_kernels", "warm_first_call_s")
    with tempfile.TemporaryDirectory() as cache:
        try:
            cold = _fresh_process(op, gates, backend, device, str(first), cache)
            warm = _fresh_process(op, gates, backend, device, str(first), cache)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return [replace(row, measure=measure).failed(error) for measure in measures]
    values = (cold["seconds"], sum(cold["kernels"].values()), sum(cold["new_kernels"].values()), warm["seconds"])
    notes = (None, _names(cold["kernels"]), _names(cold["new_kernels"]), None)
    return [
        replace(row, measure=measure, note=note).measured(value)
        for measure, value, note in zip(measures, values, notes, strict=True)
    ]


def _names(kernels: dict[str, int]) -> str | None:
    return ", ".join(f"{name} x{count}" for name, count in sorted(kernels.items())) or None


def _fresh_process(*arguments: Any) -> dict[str, Any]:
    *options, cache = arguments
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cold_start", *options],
        env={**os.environ, "TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def _compiled() -> Counter[str]:
    return Counter(path.stem for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))


def _first_call(op: str, gates: str, backend: str, device: str, first: Shape) -> dict[str, Any]:
    [ours] = candidates_for(op, backend=backend, precisions=[None], peers=[])
    wait = timer_for(device).wait
    inputs = make_inputs(first, op, gates, device=device)
    wait()
    start = time.perf_counter()
    ours.train_step(inputs)
    wait()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        ours.forward(inputs)
    before = _compiled()
    for shape in _other_sizes(first):
        inputs = make_inputs(shape, op, gates, device=device)
        ours.train_step(inputs)
        with torch.no_grad():
            ours.forward(inputs)
    wait()
    return {"seconds": seconds, "kernels": before, "new_kernels": _compiled() - before}


if __name__ == "__main__":
    op, gates, backend, device, first = sys.argv[1:]
    print(json.dumps(_first_call(op, gates, backend, device, Shape.parse(first))))
