"""Decoding speed of the operators: a CUDA graph of many one-token steps, each with a float32 state of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.inputs import Inputs, make_inputs
from benchmarks.operator_candidates import step_candidates
from benchmarks.operator_options import gates_of
from benchmarks.operator_results import OperatorRow
from benchmarks.shapes import Shape
from benchmarks.timing import Spread, Timer

__all__ = ["STEP_SHAPES", "decoding_rows"]

STEP_SHAPES = {"step-64": Shape(64, 1, 16, 128, 128), "step-1": Shape(1, 1, 16, 128, 128)}

_STEPS = 16
"""Steps per graph: the states of 64 sequences then exceed every L2 cache, and the launch of the graph hardly counts."""


def decoding_rows(op: str, *, backend: str | None, peers: list[str], device: str, timer: Timer) -> list[OperatorRow]:
    """`step_us` and `step_tb_s` of every library for a full and a single-sequence batch, with medium gates.

    Our operator is measured only if a backend is given.
    """
    gates = "medium" if "medium" in gates_of(op) else "none"
    rows = []
    for shape in STEP_SHAPES.values():
        for library, step in step_candidates(op, backend=backend, peers=peers).items():
            row = OperatorRow(str(shape), op, gates, library, measure="step_us")
            try:
                time = _step_time(shape, op, gates, step, device, timer)
            except Exception as error:  # peers and kernels under test may raise anything
                rows += [row.failed(error), replace(row, measure="step_tb_s").failed(error)]
                continue
            state_bytes = 2 * 4 * shape.B * shape.HV * shape.K * shape.V
            rows += [row.measured(time), replace(row, measure="step_tb_s").measured(state_bytes / time.median / 1e6)]
    return rows


def _step_time(
    shape: Shape, op: str, gates: str, step: Callable[[Inputs, Tensor], Any], device: str, timer: Timer
) -> Spread:
    inputs = make_inputs(shape, op, gates, device=device)
    # A generator of its own: a graph capture that failed earlier leaves the default one unusable.
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.B, shape.HV, shape.K, shape.V)
    states = [torch.randn(size, generator=generator, device=device) for _ in range(_STEPS)]

    @torch.no_grad()
    def steps() -> None:
        for state in states:
            step(inputs, state)

    total = timer.graph_milliseconds(steps)
    per_step = 1e3 / _STEPS
    return Spread(total.median * per_step, total.low * per_step, total.high * per_step, total.count)
