"""Rows and result files of the operator benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from benchmarks.result_files import MeasuredRow, Results

__all__ = ["MEASURES", "OperatorResults", "OperatorRow"]

MEASURES = {
    "forward_ms": "forward, eager, no gradient recorded",
    "forward_backward_ms": "forward and every gradient, eager",
    "forward_graph_ms": "forward, replayed from a CUDA graph",
    "forward_backward_graph_ms": "forward and every gradient, replayed from a CUDA graph",
    "peak_mib": "peak memory of forward and backward above the inputs",
    "first_forward_s": "first forward of its kind in this process, compilation and autotuning included",
    "first_training_s": "first forward and backward after that, likewise",
    "host_forward_us": "host time of one eager forward call on 64 tokens, no gradient recorded",
    "host_forward_grad_us": "the same with gradients recorded",
    "cold_first_call_s": "first forward and backward in a fresh process with an empty kernel cache",
    "warm_first_call_s": "the same in another process with the cache the first one left",
    "kernels": "kernels compiled by that first forward and backward",
    "new_kernels": "kernels compiled when T, B and H change afterwards",
    "step_us": "one decoding token, replayed from a CUDA graph",
    "step_tb_s": "state bytes read and written per second by that token",
}


@dataclass(frozen=True)
class OperatorRow(MeasuredRow):
    """One number about one operator.

    `shape` reads `BxTxHxKxV`; `gates` is weak, medium, strong or none; `note` is for the reader.
    """

    MEASURES: ClassVar[dict[str, str]] = MEASURES

    shape: str
    op: str
    gates: str
    library: str
    note: str | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured."""
        return self.shape, self.op, self.gates, self.library, self.measure


class OperatorResults(Results[OperatorRow]):
    """Numbers about operators."""

    row_type = OperatorRow

    def find(self, shape: object, op: str, gates: str, library: str, measure: str) -> OperatorRow | None:
        """The row of a key, if it was measured."""
        return self.rows.get((str(shape), op, gates, library, measure))
