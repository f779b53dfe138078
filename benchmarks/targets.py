"""What the kernels are meant to reach on an H200, and the verdict on a measured value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.cold_start import FIRST
from benchmarks.operator_decoding import STEP_SHAPES
from benchmarks.operator_results import OperatorResults, OperatorRow
from benchmarks.shapes import TABLE

__all__ = ["TARGETS", "Target", "verdict"]

_SHAPES = {**TABLE, **STEP_SHAPES, "first": FIRST}
_DELTA, _ALL = ("delta", "gdn"), ("delta", "gdn", "kda")


@dataclass(frozen=True)
class Target:
    """A bound on a measure of the operators `ops` at the shape called `shape`.

    `bound` is in the unit of the measure, or a factor on the measured value of the library `relative_to`. Values must
    not exceed it, except for rates (`at_least`).
    """

    shape: str
    ops: tuple[str, ...]
    measure: str
    bound: float
    relative_to: str | None = None
    at_least: bool = False

    def limit(self, results: OperatorResults, row: OperatorRow) -> float | None:
        """The bound in the measure's unit; None if the library it refers to was not measured."""
        if self.relative_to is None:
            return self.bound
        peer = results.find(row.shape, row.op, row.gates, self.relative_to, self.measure)
        return None if peer is None or peer.value is None else self.bound * peer.value

    def applies_to(self, row: OperatorRow) -> bool:
        """Whether a row, of any library, measures what the target is about."""
        return (row.shape, row.measure) == (str(_SHAPES[self.shape]), self.measure) and row.op in self.ops


def verdict(value: float, limit: float, at_least: bool = False) -> str:
    """`met`, or by how many percent of the limit it was missed."""
    if value >= limit if at_least else value <= limit:
        return "met"
    if limit == 0:
        return f"missed: {value:.0f} instead of none"
    return f"missed by {abs(value / limit - 1):.0%}"


def _times(shape: str, ops: tuple[str, ...], forward: float, both: float) -> Iterator[Target]:
    """Bounds in ms: of eager calls, and of the GPU alone, which replays of a graph show."""
    for kind in ("", "_graph"):
        yield Target(shape, ops, f"forward{kind}_ms", forward)
        yield Target(shape, ops, f"forward_backward{kind}_ms", both)


def _targets() -> Iterator[Target]:
    for op, forward, both, peak in (("delta", 0.22, 0.72, 850), ("gdn", 0.225, 0.82, 850), ("kda", 0.42, 1.60, 1200)):
        yield from _times("train", (op,), forward, both)
        yield Target("train", (op,), "peak_mib", peak)
    yield from _times("long", _DELTA, 0.45, 1.35)
    yield Target("long", _DELTA, "peak_mib", 870)
    yield from _times("long", ("kda",), 0.65, 2.2)
    yield from _times("grouped", ("gdn",), 0.21, 1.0)
    yield Target("small", _ALL, "forward_ms", 0.20)
    yield Target("small", _ALL, "forward_backward_ms", 0.60)
    for op, forward, both in (("delta", 0.09, 0.35), ("gdn", 0.070, 0.22), ("kda", 0.09, 0.35)):
        yield Target("small", (op,), "forward_graph_ms", forward)
        yield Target("small", (op,), "forward_backward_graph_ms", both)
    for measure in ("forward_ms", "forward_backward_ms"):
        yield Target("narrow", _ALL, measure, 1 / 2, relative_to="fla")
        yield Target("wide", _ALL, measure, 1 / 1.5, relative_to="fla")
    for shape, ops in (("long", ("kda",)), ("small", _ALL), ("narrow", _ALL), ("wide", _ALL)):
        yield Target(shape, ops, "peak_mib", 1.0, relative_to="fla")
    for shape in TABLE:
        yield Target(shape, _ALL, "host_forward_us", 1 / 4, relative_to="fla")
    yield Target("first", _ALL, "cold_first_call_s", 15.0)
    yield Target("first", _ALL, "new_kernels", 0)
    yield Target("step-64", _ALL, "step_tb_s", 3.2, at_least=True)
    yield Target("step-1", _ALL, "step_us", 10.0)


TARGETS = list(_targets())
