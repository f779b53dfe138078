"""Result files: one number per row, every row pointing at the run (machine, versions, commit) that produced it."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from deltazoo.names import unknown
from deltazoo.workbench.bench.timing import Spread

__all__ = ["MEASURES", "Results", "Row", "Run", "describe_run", "load_results", "write_rows"]

SCHEMA = 1

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
class Row:
    """One measured number, or the reason why there is none.

    `shape` reads `BxTxHxKxV`; `gates` is weak, medium, strong or none; `measure` a key of `MEASURES`, which ends in its
    unit; `low` and `high` are the 20th and 80th percentile of `samples` repeats; `note` is for the reader.
    """

    shape: str
    op: str
    gates: str
    library: str
    measure: str
    value: float | None
    low: float | None = None
    high: float | None = None
    samples: int = 1
    error: str | None = None
    note: str | None = None
    run: str = ""

    def failed(self, error: BaseException) -> Row:
        """The same row with the reason why there is no number: class and first line, short enough for a footnote."""
        lines = str(error).strip().splitlines()
        return replace(self, value=None, samples=0, error=f"{type(error).__name__}: {lines[0] if lines else ''}"[:300])

    def measured(self, value: Spread | float) -> Row:
        """The same row with its number."""
        if isinstance(value, Spread):
            return replace(self, value=value.median, low=value.low, high=value.high, samples=value.count)
        return replace(self, value=float(value))

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What a later measurement of the same thing replaces."""
        return self.shape, self.op, self.gates, self.library, self.measure


@dataclass(frozen=True)
class Run:
    """Where and with what rows were measured; versions are None where a package is absent."""

    id: str
    date: str
    commit: str
    gpu: str | None
    driver: str | None
    cpu: str
    python: str
    torch: str
    cuda: str | None
    triton: str | None
    fla: str | None
    command: list[str] = field(default_factory=list)
    copy_tb_s: float | None = None
    matmul_tflop_s: float | None = None
    missing_peers: dict[str, str] = field(default_factory=dict)
    transformers: str | None = None
    liger: str | None = None
    threads: int | None = None


@dataclass
class Results:
    """The content of one or several result files; a later row with the same key replaces an earlier one."""

    runs: dict[str, Run] = field(default_factory=dict)
    rows: dict[tuple[str, ...], Row] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Adds or replaces a row; ValueError for an unknown measure, KeyError for an unknown run."""
        if row.measure not in MEASURES:
            raise ValueError(unknown("measure", row.measure, MEASURES))
        if row.run not in self.runs:
            raise KeyError(f"row of run {row.run!r}, which the results do not describe")
        self.rows[row.key] = row

    def find(self, shape: object, op: str, gates: str, library: str, measure: str) -> Row | None:
        """The row of a key, if it was measured."""
        return self.rows.get((str(shape), op, gates, library, measure))

    def merge(self, other: Results) -> None:
        """Takes over everything of `other`; of two rows with one key the one of the later run stays."""
        self.runs.update(other.runs)
        for row in other.rows.values():
            mine = self.rows.get(row.key)
            if mine is None or self.runs[mine.run].date <= self.runs[row.run].date:
                self.add(row)

    def save(self, path: Path) -> None:
        """Writes atomically, so that a run that is killed leaves the rows measured so far."""
        write_rows(path, SCHEMA, self.runs.values(), self.rows.values())


def write_rows(path: Path, schema: int, runs: Iterable[Run], rows: Iterable[Any]) -> None:
    """Writes a result file at once or not at all; `rows` are dataclasses."""
    content = {"schema": schema, "runs": [asdict(run) for run in runs], "rows": [asdict(row) for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)


def load_results(paths: Iterable[Path]) -> Results:
    """Reads and merges result files.

    Raises:
        ValueError: a file that is not one of ours, naming the file and what is wrong with it.
    """
    merged = Results()
    for path in paths:
        try:
            content = json.loads(path.read_text())
            if content["schema"] != SCHEMA:
                raise ValueError(f"schema {content['schema']}, expected {SCHEMA}")
            one = Results({run["id"]: _from_json(Run, run) for run in content["runs"]})
            for row in content["rows"]:
                one.add(_from_json(Row, row))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a benchmark result: {error}") from error
        merged.merge(one)
    return merged


def _from_json(cls: type, content: dict[str, Any]) -> Any:
    known = [field.name for field in fields(cls)]
    for key in sorted(content.keys() - set(known)):
        raise ValueError(f"in a {cls.__name__.lower()}: {unknown('key', key, known)}")
    return cls(**content)


def describe_run(*, device: str, commit: str | None, command: list[str], **measured: Any) -> Run:
    """The machine and the versions of this process.

    Args:
        device: what the run uses; a GPU is described only if it is one.
        commit: of the code; read from git when None ("+changes" if files differ from it), "unknown" where that fails.
        command: the command line, for the record.
        measured: further fields of `Run`.
    """
    now = datetime.now(UTC)
    on_gpu = torch.device(device).type == "cuda"
    commit = commit or _git_commit()
    return Run(
        id=f"{now:%Y%m%dT%H%M%S.%f}-{commit[:12]}",
        date=now.isoformat(timespec="microseconds"),
        commit=commit,
        gpu=torch.cuda.get_device_name() if on_gpu else None,
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        cpu=_cpu_name(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=_version("triton"),
        fla=_version("fla-core"),
        transformers=_version("transformers"),
        liger=_version("liger-kernel"),
        threads=torch.get_num_threads(),
        command=command,
        **measured,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0] or None


def _git_commit() -> str:
    here = str(Path(__file__).parent)
    commit = _output("git", "-C", here, "rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    changed = _output("git", "-C", here, "status", "--porcelain", "--", str(Path(__file__).parents[2]))
    return commit + "+changes" if changed else commit


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
