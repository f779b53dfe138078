"""The operator benchmark: every candidate on every shape and gate, in one process, saved after each of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.cold_start import cold_start_rows
from benchmarks.inputs import make_inputs
from benchmarks.lower_bound import Ceilings
from benchmarks.operator_candidates import Candidate, candidates_for, installed_peers
from benchmarks.operator_decoding import decoding_rows
from benchmarks.operator_options import GROUPS, OPS, gates_of
from benchmarks.operator_results import OperatorResults, OperatorRow
from benchmarks.provenance import describe_run
from benchmarks.shapes import TABLE, Shape
from benchmarks.timing import Spread, Timer, timer_for

__all__ = ["DeviceLost", "Plan", "bench_ops"]

_TINY_TOKENS = 64


class DeviceLost(RuntimeError):
    """A kernel broke the CUDA context: nothing more can be measured in this process."""


@dataclass(frozen=True)
class Plan:
    """What to measure; see the command line for the meaning of each."""

    shapes: list[Shape] = field(default_factory=lambda: list(TABLE.values()))
    ops: list[str] = field(default_factory=lambda: list(OPS))
    gates: list[str] = field(default_factory=lambda: ["weak", "medium", "strong"])
    groups: list[str] = field(default_factory=lambda: list(GROUPS))
    peers: list[str] = field(default_factory=lambda: ["fla", "sdpa"])
    precisions: list[str | None] = field(default_factory=lambda: [None])
    ours: bool = True
    backend: str = "triton"
    device: str = "cuda"
    warm_up_only: bool = False

    def candidates(self) -> Iterator[tuple[Shape, str, str, Candidate]]:
        """Shape by shape, so that implementations of one operator are timed one after the other."""
        for shape in self.shapes:
            for op in self.ops:
                if op == "softmax" and shape.groups > 1:  # several values per key are no attention
                    continue
                found = candidates_for(
                    op, backend=self.backend, precisions=self.precisions if self.ours else [], peers=self.peers
                )
                for gates in gates_of(op):
                    if gates == "none" or gates in self.gates:
                        for candidate in found:
                            yield shape, op, gates, candidate


def bench_ops(
    plan: Plan,
    out: Path,
    *,
    commit: str | None = None,
    command: list[str] | None = None,
    resume: bool = False,
    timer: Timer | None = None,
    report: Callable[[str], None] = print,
) -> OperatorResults:
    """Measures a plan and writes `out` after every candidate; rows already in `out` are kept or replaced.

    Args:
        plan: what to measure.
        out: the JSON result file.
        commit, command: for the record; see `describe_run`.
        resume: leave out candidates that have rows in `out`, those that failed too.
        timer: chosen by device unless given.
        report: receives one line per candidate.

    Returns:
        everything in `out`.

    Raises:
        ValueError: a plan that cannot be measured at all. DeviceLost: after saving what there was.
    """
    timer = timer or timer_for(plan.device)
    peers, missing = installed_peers(plan.peers)
    plan = replace(plan, peers=peers)
    for name, reason in missing.items():
        report(f"{name}: not measured, {reason}")
    results = OperatorResults.load([out]) if out.exists() and not plan.warm_up_only else OperatorResults()
    done: set[tuple[object, ...]] = set()
    if resume:
        done = {row.key[:4] for row in results.rows.values()} | {(row.measure, row.op) for row in results.rows.values()}
    on_gpu = torch.device(plan.device).type == "cuda"
    ceilings = measure_ceilings(timer) if on_gpu and not plan.warm_up_only else None
    run = describe_run(
        device=plan.device,
        commit=commit,
        command=command or [],
        missing_peers=missing,
        copy_tb_s=ceilings and ceilings.copy_tb_s,
        matmul_tflop_s=ceilings and ceilings.matmul_tflop_s,
    )
    results.runs[run.id] = run

    def keep(rows: list[OperatorRow]) -> None:
        for row in rows:
            results.add(replace(row, run=run.id))
        if not plan.warm_up_only:
            results.save(out)
        for start in dict.fromkeys(row.key[:4] for row in rows):
            report(_line([row for row in rows if row.key[:4] == start]))
        if any(row.error for row in rows):
            _check_device(timer)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    for shape, op, gates, candidate in plan.candidates():
        if (str(shape), op, gates, candidate.library) not in done:
            try:
                rows = _candidate_rows(plan, shape, op, gates, candidate, timer)
            except torch.OutOfMemoryError as error:  # not even the inputs fit
                rows = [OperatorRow(str(shape), op, gates, candidate.library, measure="forward_ms").failed(error)]
            keep(rows)
    for op in plan.ops:
        if op == "softmax" or plan.warm_up_only:
            continue
        if "decode" in plan.groups and ("step_us", op) not in done:
            backend = plan.backend if plan.ours else None
            keep(decoding_rows(op, backend=backend, peers=peers, device=plan.device, timer=timer))
        if "cold" in plan.groups and plan.ours and ("cold_first_call_s", op) not in done:
            keep(cold_start_rows(op, backend=plan.backend, device=plan.device))
    return results


def measure_ceilings(timer: Timer) -> Ceilings:
    """What a 2 GiB copy and an 8192-cubed bf16 product reach on this GPU."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    copy_ms = timer.milliseconds(lambda: target.copy_(source)).median
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16).unbind()
    matmul_ms = timer.milliseconds(lambda: a @ b).median
    return Ceilings(copy_tb_s=2 * 2**31 / copy_ms / 1e9, matmul_tflop_s=2 * 8192**3 / matmul_ms / 1e9)


def _candidate_rows(
    plan: Plan, shape: Shape, op: str, gates: str, candidate: Candidate, timer: Timer
) -> list[OperatorRow]:
    """Everything about one candidate on one shape; what fails leaves its error as a row."""
    rows: list[OperatorRow] = []

    def record(measure: str, measurement: Callable[[], Spread | float]) -> str | None:
        row = OperatorRow(str(shape), op, gates, candidate.library, measure=measure)
        try:
            rows.append(row.measured(measurement()))
        except Exception as error:  # peers and kernels under test may raise anything
            rows.append(row.failed(error))
        return rows[-1].error

    def record_pass(
        first_call: str, call: Callable[[], object], measures: dict[str, Callable[[], Spread | float]]
    ) -> None:
        # A peer may run forward and fail to train, so each pass is measured separately. If its first call fails, all
        # its measures do.
        failure = record(first_call, lambda: _seconds(call, timer)) if measures else None
        for measure, measurement in measures.items():
            if failure is not None:
                rows.append(replace(rows[-1], measure=measure))
            elif not plan.warm_up_only:
                record(measure, measurement)

    os.environ.update(candidate.environment)
    inputs = make_inputs(shape, op, gates, device=plan.device)
    tiny = make_inputs(replace(shape, B=1, T=_TINY_TOKENS), op, gates, device=plan.device)

    def forward() -> object:
        with torch.no_grad():
            return candidate.forward(inputs)

    def training() -> object:
        return candidate.train_step(inputs)

    def host_without_gradient() -> Spread:
        with torch.no_grad():
            return timer.host_microseconds(lambda: candidate.forward(tiny))

    forward_measures: dict[str, tuple[set[str], Callable[[], Spread | float]]] = {
        "forward_ms": ({"forward"}, lambda: timer.milliseconds(forward)),
        "forward_graph_ms": ({"forward", "graphs"}, lambda: timer.graph_milliseconds(forward)),
        "host_forward_us": ({"host"}, host_without_gradient),
        "host_forward_grad_us": ({"host"}, lambda: timer.host_microseconds(lambda: candidate.forward(tiny))),
    }
    training_measures: dict[str, tuple[set[str], Callable[[], Spread | float]]] = {
        "forward_backward_ms": ({"training"}, lambda: timer.milliseconds(training)),
        "forward_backward_graph_ms": ({"training", "graphs"}, lambda: timer.graph_milliseconds(training)),
        "peak_mib": ({"memory"}, lambda: timer.peak_mib(training)),
    }
    for first_call, call, measures in (
        ("first_forward_s", forward, forward_measures),
        ("first_training_s", training, training_measures),
    ):
        wanted = {name: measurement for name, (groups, measurement) in measures.items() if groups <= set(plan.groups)}
        record_pass(first_call, call, wanted)
    return rows


def _seconds(call: Callable[[], object], timer: Timer) -> float:
    start = time.perf_counter()
    call()
    timer.wait()
    return time.perf_counter() - start


_SHORT = {
    "forward_ms": "fwd",
    "forward_graph_ms": "graph",
    "forward_backward_ms": "f+b",
    "forward_backward_graph_ms": "graph",
    "peak_mib": "MiB",
    "first_forward_s": "first",
    "first_training_s": "first",
    "host_forward_us": "host",
    "host_forward_grad_us": "grad",
    "step_us": "us",
    "step_tb_s": "TB/s",
}


def _line(rows: list[OperatorRow]) -> str:
    """One line for the log; each distinct error once."""
    first = rows[0]
    cells = [f"{_SHORT.get(row.measure, row.measure)} {row.value:.4g}" for row in rows if row.value is not None]
    errors = [f"FAILED {error}" for error in dict.fromkeys(row.error for row in rows if row.error)]
    head = f"{first.shape:<20} {first.op:<7} {first.gates:<6} {first.library:<13}"
    return f"{head} {'  '.join(cells + errors)}"


def _check_device(timer: Timer) -> None:
    try:
        timer.wait()
        if torch.cuda.is_available():
            torch.ones(1, device="cuda").sum().item()
    except RuntimeError as error:
        raise DeviceLost(f"the GPU no longer answers this process ({error})") from error
