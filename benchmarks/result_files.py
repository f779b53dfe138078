"""Result files: one number per row, and every row names the run (machine, versions, commit) that produced it.

The scripts' own files, of one run each, are written by `write_results`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from benchmarks.provenance import Run
from benchmarks.timing import Spread
from deltazoo.names import unknown
from deltazoo.training.checkpoint_files import as_json, write_whole

__all__ = ["MeasuredRow", "Results", "one_line", "write_results"]

SCHEMA = 1


def one_line(error: BaseException) -> str:
    """Class and first line of an error, short enough for a footnote."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


@dataclass(frozen=True)
class MeasuredRow:
    """One measured number, or the reason why there is none. Subclasses say what was measured.

    `measure` is a key of the subclass's `MEASURES` and ends in its unit; `low` and `high` are the 20th and 80th
    percentile of `samples` repeats; `run` is the id of a `Run`.
    """

    MEASURES: ClassVar[dict[str, str]] = {}

    measure: str = field(kw_only=True)
    value: float | None = field(default=None, kw_only=True)
    low: float | None = field(default=None, kw_only=True)
    high: float | None = field(default=None, kw_only=True)
    samples: int = field(default=1, kw_only=True)
    error: str | None = field(default=None, kw_only=True)
    run: str = field(default="", kw_only=True)

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured; a later row with the same key replaces this one."""
        raise NotImplementedError

    def measured(self, value: Spread | float) -> Self:
        """The same row with its number."""
        if isinstance(value, Spread):
            return replace(self, value=value.median, low=value.low, high=value.high, samples=value.count)
        return replace(self, value=float(value), samples=1)

    def failed(self, error: BaseException) -> Self:
        """The same row with the reason why there is no number."""
        return replace(self, value=None, samples=0, error=one_line(error))


Row = TypeVar("Row", bound=MeasuredRow)


@dataclass
class Results(Generic[Row]):
    """The content of one or several result files; a later row with the same key replaces an earlier one."""

    row_type: ClassVar[type[MeasuredRow]]
    kind: ClassVar[str] = "a benchmark result"

    runs: dict[str, Run] = field(default_factory=dict)
    rows: dict[tuple[object, ...], Row] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Add or replace a row; ValueError for an unknown measure, KeyError for an unknown run."""
        if row.measure not in row.MEASURES:
            raise ValueError(unknown("measure", row.measure, row.MEASURES))
        if row.run not in self.runs:
            raise KeyError(f"row of run {row.run!r}, which the results do not describe")
        self.rows[row.key] = row

    def merge(self, other: Self) -> None:
        """Take over everything of `other`; of two rows with one key, keep the one of the later run."""
        self.runs.update(other.runs)
        for row in other.rows.values():
            mine = self.rows.get(row.key)
            if mine is None or self.runs[mine.run].date <= self.runs[row.run].date:
                self.add(row)

    def save(self, path: Path) -> None:
        """Write the file at once or not at all, so that a run that is killed leaves the rows measured so far."""
        rows = [_own_fields_first(row) for row in self.rows.values()]
        _write(path, {"schema": SCHEMA, "runs": [asdict(run) for run in self.runs.values()], "rows": rows})

    @classmethod
    def load(cls, paths: Iterable[Path]) -> Self:
        """Read and merge result files.

        Raises:
            ValueError: a file that is not one of ours, naming the file and what is wrong with it.
        """
        merged = cls()
        for path in paths:
            try:
                content = json.loads(path.read_text())
                if content["schema"] != SCHEMA:
                    raise ValueError(f"schema {content['schema']}, expected {SCHEMA}")
                one = cls({run["id"]: _from_json(Run, run) for run in content["runs"]})
                for row in content["rows"]:
                    one.add(_from_json(cls.row_type, row))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is not {cls.kind}: {error}") from error
            merged.merge(one)
        return merged


def write_results(path: Path, run: Run, **content: Any) -> None:
    """Write a result file of one run: the run, then the content; again whenever there is more of it."""
    _write(path, {"run": asdict(run), **content})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, as_json(content, indent=1) + "\n")


def _own_fields_first(row: MeasuredRow) -> dict[str, Any]:
    common = {f.name for f in fields(MeasuredRow)}
    return dict(sorted(asdict(row).items(), key=lambda item: item[0] in common))


def _from_json(cls: type, content: dict[str, Any]) -> Any:
    unexpected = content.keys() - {f.name for f in fields(cls)}
    if unexpected:
        raise ValueError(f"unknown key {sorted(unexpected)[0]!r} in a {cls.__name__}")
    return cls(**content)
