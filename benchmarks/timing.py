"""Time of a call: on a GPU by events around warmed-up repeats with a cold L2 cache, on a CPU by its clock.

Repeats follow each other without synchronisation. A call whose launches take longer than its kernels therefore shows
the time of its launches, as a user sees it in eager mode. Replays of a captured graph show the kernels alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = [
    "CpuTimer",
    "CudaTimer",
    "Spread",
    "Timer",
    "captured",
    "clock_for",
    "now",
    "peak_bytes",
    "timer_for",
]

Call = Callable[[], object]

# Time to spend before and while measuring, in milliseconds of the call's own time, and bounds on measured repeats.
_WARM_UP_MS, _REPEAT_MS = 25.0, 150.0
_AT_LEAST, _AT_MOST = 10, 300


@dataclass(frozen=True)
class Spread:
    """Median of `count` samples with their 20th and 80th percentile, in the unit of the measure."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        """Raises ValueError without samples."""
        if not samples:
            raise ValueError("no samples to summarise")
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], len(ordered))


class Timer(Protocol):
    """Time and memory of calls on one device."""

    def milliseconds(self, call: Call) -> Spread:
        """Time of a warmed-up call."""
        ...

    def graph_milliseconds(self, call: Call) -> Spread:
        """Time of a replay of the call captured in a CUDA graph."""
        ...

    def peak_mib(self, call: Call) -> float:
        """Most memory held at once during the call, above what was held before it."""
        ...

    def host_microseconds(self, call: Call) -> Spread:
        """Time until the call returns to Python, without waiting for the GPU."""
        ...

    def wait(self) -> None:
        """Wait until the device is idle; errors of earlier calls are raised here."""
        ...


def timer_for(device: str) -> Timer:
    """The timer for a device."""
    return CudaTimer() if torch.device(device).type == "cuda" else CpuTimer()


def clock_for(device: str) -> Callable[[], float]:
    """A clock in seconds for calls that end when the work is done.

    On a CPU with one thread it counts the time that this process computed, which other work on the machine hardly
    changes; otherwise the time that passed.
    """
    alone = torch.device(device).type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def now(device: torch.device | str) -> float:
    """Seconds on a clock, read once the device has done its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def captured(call: Call) -> torch.cuda.CUDAGraph:
    """The call as a CUDA graph, after warming up on the capturing stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def peak_bytes(call: Call) -> int:
    """Most memory that a call holds on a GPU, above what was held before, by the allocator, after a warm-up call."""
    call()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


class CudaTimer:
    """Events on the current stream, a flush of the L2 cache before every repeat."""

    def __init__(self) -> None:
        self._flush = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def wait(self) -> None:
        """Waits for all streams; a broken context raises here."""
        torch.cuda.synchronize()

    def _timed(self, call: Call, repeats: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, stop in events:
            self._flush.zero_()
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in events]

    def milliseconds(self, call: Call) -> Spread:
        """Median over as many repeats as fit the budget, L2 cache flushed before each."""
        call()
        estimate = max(statistics.median(self._timed(call, 3)), 1e-3)
        self._timed(call, min(max(int(_WARM_UP_MS / estimate), 1), _AT_MOST))
        repeats = min(max(int(_REPEAT_MS / estimate), _AT_LEAST), _AT_MOST)
        return Spread.of(self._timed(call, repeats))

    def graph_milliseconds(self, call: Call) -> Spread:
        """The same for replays of one captured graph."""
        graph = captured(call)
        try:
            return self.milliseconds(graph.replay)
        finally:
            graph.reset()

    def peak_mib(self, call: Call) -> float:
        """`peak_bytes` in MiB."""
        return peak_bytes(call) / 2**20

    def host_microseconds(self, call: Call) -> Spread:
        """Short batches between waits, so that the launch queue never fills up."""
        return _host_microseconds(call, self.wait)


class CpuTimer:
    """The CPU's clock; no graphs, no memory statistics."""

    _REPEATS = 5

    def wait(self) -> None:
        """Nothing to wait for."""

    def milliseconds(self, call: Call) -> Spread:
        """Median of a few calls after one to warm up."""
        call()
        samples = []
        for _ in range(self._REPEATS):
            start = time.perf_counter_ns()
            call()
            samples.append((time.perf_counter_ns() - start) / 1e6)
        return Spread.of(samples)

    def graph_milliseconds(self, call: Call) -> Spread:
        """Raises NotImplementedError."""
        raise NotImplementedError("CUDA graphs need an NVIDIA GPU")

    def peak_mib(self, call: Call) -> float:
        """Raises NotImplementedError."""
        raise NotImplementedError("peak memory is read from the CUDA allocator")

    def host_microseconds(self, call: Call) -> Spread:
        """As `milliseconds`."""
        return _host_microseconds(call, self.wait, batches=1, calls=self._REPEATS)


def _host_microseconds(call: Call, wait: Callable[[], None], batches: int = 20, calls: int = 20) -> Spread:
    for _ in range(3):
        call()
    samples = []
    for _ in range(batches):
        wait()
        for _ in range(calls):
            start = time.perf_counter_ns()
            call()
            samples.append((time.perf_counter_ns() - start) / 1e3)
    wait()
    return Spread.of(samples)
