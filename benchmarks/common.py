"""What all benchmarks share: timing, result files, options of the command line, processes side by side."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]
Row = dict[str, Any]

PACKAGES = ("triton", "transformers", "fla-core", "flash-qla", "tilelang")

# Time to spend before and while measuring, in milliseconds of the call's own time, and bounds on measured repeats.
_WARM_UP_MS, _REPEAT_MS = 25.0, 150.0
_AT_LEAST, _AT_MOST = 10, 300
_ON_A_CPU = 5


@dataclass(frozen=True)
class Spread:
    """Median of `samples` measured values with their 20th and 80th percentile."""

    value: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        """Raises ValueError without samples."""
        if not samples:
            raise ValueError("no samples to summarise")
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], len(ordered))

    def times(self, factor: float) -> Spread:
        """In another unit."""
        return Spread(self.value * factor, self.low * factor, self.high * factor, self.samples)

    def rate_of(self, amount: float) -> Spread:
        """`amount` per time. A slow sample is a low speed: the percentiles are exchanged."""
        return Spread(amount / self.value, amount / self.high, amount / self.low, self.samples)


class Timer:
    """Time of a call: on a GPU by events around warmed-up repeats with a cold L2 cache, on a CPU by its clock.

    Repeats follow each other without synchronisation. A call whose launches take longer than its kernels therefore
    shows the time of its launches, as a user sees it in eager mode. Replays of a graph show the kernels alone.
    """

    def __init__(self, device: str) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self._flush = torch.empty(2**28, dtype=torch.int8, device=device) if self.on_gpu else None

    def wait(self) -> None:
        """Wait until the device is idle; errors of earlier calls are raised here."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def samples(self, call: Call, repeats: int) -> list[float]:
        """Milliseconds of every repeat, the L2 cache flushed before each."""
        if self._flush is None:
            return [_host_seconds(call) * 1e3 for _ in range(repeats)]
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, stop in events:
            self._flush.zero_()
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in events]

    def milliseconds(self, call: Call) -> Spread:
        """Over as many repeats as fit the budget, after warming up; on a CPU a few."""
        call()
        if not self.on_gpu:
            return Spread.of(self.samples(call, _ON_A_CPU))
        estimate = max(statistics.median(self.samples(call, 3)), 1e-3)
        self.samples(call, min(max(int(_WARM_UP_MS / estimate), 1), _AT_MOST))
        return Spread.of(self.samples(call, min(max(int(_REPEAT_MS / estimate), _AT_LEAST), _AT_MOST)))

    def graph_milliseconds(self, call: Call) -> Spread:
        """The same for replays of one CUDA graph of the call."""
        if not self.on_gpu:
            raise NotImplementedError("CUDA graphs need an NVIDIA GPU")
        graph = captured(call)
        try:
            return self.milliseconds(graph.replay)
        finally:
            graph.reset()

    def host_microseconds(self, call: Call) -> Spread:
        """Time until the call returns to Python, in short batches between waits: the launch queue never fills up."""
        batches, calls = (20, 20) if self.on_gpu else (1, _ON_A_CPU)
        for _ in range(3):
            call()
        taken = []
        for _ in range(batches):
            self.wait()
            taken += [_host_seconds(call) * 1e6 for _ in range(calls)]
        self.wait()
        return Spread.of(taken)

    def peak_mib(self, call: Call) -> float:
        """Most memory that a call holds, above what was held before, by the allocator, after a warm-up call."""
        if not self.on_gpu:
            raise NotImplementedError("peak memory is read from the CUDA allocator")
        call()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - held) / 2**20


def _host_seconds(call: Call) -> float:
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1e9


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
    # Other threads, NCCL's watchdog among them, may ask the device meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    return graph


def clock_for(device: torch.device | str) -> Callable[[], float]:
    """A clock in seconds for calls that end when the work is done.

    On a CPU with one thread it counts the time that this process computed, which other work on the machine hardly
    changes; otherwise the time that passed.
    """
    alone = torch.device(device).type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def now(device: torch.device | str) -> float:
    """Seconds on the clock, read once the device has done its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def document_positions(total: int, device: torch.device | str) -> Tensor:
    """Positions `[1, total]` of documents of 64 to 2,048 tokens that fill a row."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(2 ** torch.empty(1).uniform_(6, 11, generator=generator))))
    return torch.cat([torch.arange(length, device=device) for length in lengths])[None]


def git_commit() -> str:
    """The checked-out commit, with "+changes" if files differ from it; "unknown" without git."""
    root = Path(__file__).resolve().parents[1]
    commit = _printed("git", "-C", str(root), "rev-parse", "HEAD")
    changed = commit and _printed("git", "-C", str(root), "status", "--porcelain", "--", "src", "benchmarks")
    return f"{commit or 'unknown'}{'+changes' if changed else ''}"


def processor_name() -> str:
    """The CPU's model name, or what the platform says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def package_version(package: str) -> str | None:
    """The installed version of a package, None if it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _printed(*command: str) -> str | None:
    """The first line that a command prints; None if it fails or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0] or None


def describe_run(device: str, commit: str | None) -> Row:
    """Machine, versions, commit and command of this process."""
    commit, date = commit or git_commit(), datetime.now(UTC)
    gpu = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None
    return {
        "id": f"{date:%Y%m%dT%H%M%S.%f}-{commit[:12]}",
        "date": date.isoformat(timespec="seconds"),
        "commit": commit,
        "command": sys.orig_argv[1:],
        "gpu": gpu,
        "driver": _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "cpu": processor_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),  # the package's version names no CUDA since torch 2.15
        **{package: package_version(package) for package in PACKAGES},
    }


def one_line(error: BaseException) -> str:
    """Class and first line of an error, short enough for a row."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


class Results:
    """A result file `{"runs": [...], "rows": [...]}`: every row names its run, and is written as it is measured.

    A row is a setting and what was found. A row of an existing file with the same setting is replaced, others stay.

    Raises:
        ValueError: an existing file that is no result file.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.path: Path = arguments.out
        self.runs: list[Row] = []
        self.rows: list[Row] = []
        if self.path.is_file():
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or not {"runs", "rows"} <= content.keys():
                raise ValueError(f"{self.path} is not a result file with runs and rows, and is not overwritten")
            self.runs, self.rows = content["runs"], content["rows"]
        self.run = describe_run(arguments.device, arguments.commit)
        self.runs.append(self.run)

    def has(self, setting: Row) -> bool:
        """Whether there is a row of this setting, a failure too."""
        return any(_is_of(row, setting) for row in self.rows)

    def add(self, setting: Row, found: Spread | Row | float) -> Row:
        """Add a row, write the file and print the row."""
        found = {"value": float(found)} if isinstance(found, int | float) else found
        row = {**setting, **(vars(found) if isinstance(found, Spread) else found), "run": self.run["id"]}
        self.rows = [old for old in self.rows if not _is_of(old, setting)] + [row]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".part")  # whole or not at all
        partial.write_text(json.dumps({"runs": self.runs, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)
        print("  ".join(_shown(value) for key, value in row.items() if key != "run"), flush=True)
        return row

    def measure(self, setting: Row, call: Callable[[], Spread | Row | float]) -> Row:
        """Add what a call finds, or the reason why it finds nothing."""
        try:
            return self.add(setting, call())
        except Exception as error:  # peers and kernels under test may raise anything
            return self.fail(setting, error)

    def fail(self, setting: Row, error: BaseException) -> Row:
        """Add the reason why there is no number."""
        return self.add(setting, {"value": None, "error": one_line(error)})

    def status(self) -> int:
        """The exit status: 1 if a measurement of this run failed."""
        mine = [row for row in self.rows if row["run"] == self.run["id"]]
        failed = sum("error" in row for row in mine)
        print(f"{len(mine)} rows, {failed} of them failures, in {self.path}")
        return int(failed > 0)


def _is_of(row: Row, setting: Row) -> bool:
    return all(row.get(key) == value for key, value in setting.items())


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {_shown(inner)}' for key, inner in value.items())})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def options(description: str | None) -> argparse.ArgumentParser:
    """A command line with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file; rows of an existing one stay")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="of what is measured; read from git unless given")
    return parser


def side_by_side(commands: list[list[str]], jobs: int) -> Iterator[tuple[int, str]]:
    """Exit status and output of Python with these arguments, `jobs` at a time; what they write to stderr is shown."""

    def run(command: list[str]) -> tuple[int, str]:
        # Kernels compiled there are left for others. Which is fastest has to be measured on an idle GPU.
        environment = os.environ | {"FLA_CACHE_RESULTS": "0"}
        done = subprocess.run([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True)
        return done.returncode, done.stdout

    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        yield from pool.map(run, commands)
