"""A timer that runs each call once and answers with fixed numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from benchmarks.timing import Spread


class FakeTimer:
    """Milliseconds count up from 1, so that every row can be told apart; `broken_after` waits, the device is gone."""

    def __init__(self, broken_after: int | None = None) -> None:
        self.numbers = count(1)
        self.waits = 0
        self.broken_after = broken_after

    def _next(self, call: Callable[[], object]) -> Spread:
        call()
        value = float(next(self.numbers))
        return Spread(value, value - 0.5, value + 0.5, 7)

    milliseconds = graph_milliseconds = host_microseconds = _next

    def peak_mib(self, call: Callable[[], object]) -> float:
        return self._next(call).median

    def wait(self) -> None:
        self.waits += 1
        if self.broken_after is not None and self.waits > self.broken_after:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
