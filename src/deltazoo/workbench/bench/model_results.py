"""Result files of whole models: one number per row, every row pointing at the run that produced it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from deltazoo.names import unknown
from deltazoo.workbench.bench.operator_results import Run, write_rows
from deltazoo.workbench.bench.timing import Spread

__all__ = ["MEASURES", "ModelResults", "ModelRow", "load_model_results"]

SCHEMA = 1

MEASURES = {
    "first_step_s": "first training step of a fresh model, compilation included",
    "train_tok_s": "training tokens per second: forward, backward, clipping, AdamW",
    "train_peak_gib": "peak memory of such a step, model and optimizer included",
    "kept_kib": "KiB per token kept between forward and backward pass, logits included",
    "profile_ms": "time of one kind of work in a training step",
    "decode_tok_s": "new tokens per second, all rows together",
    "prefill_tok_s": "prompt tokens per second, in pieces",
    "token_ms": "one more token after a context",
    "context_peak_gib": "peak memory of prompt and further tokens, model included",
}


@dataclass(frozen=True)
class ModelRow:
    """One measured number, or the reason why there is none.

    `size` and `model` name an architecture, `library` whose code runs it and `way` how; `batch` rows of `tokens` tokens
    (prompt or context for decoding); `part` a kind of work, for profiles; `low` and `high` are the 20th and 80th
    percentile of `samples` repeats.
    """

    size: str
    model: str
    library: str
    way: str
    dtype: str
    measure: str
    batch: int
    tokens: int
    part: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    error: str | None = None
    run: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """What a later measurement of the same thing replaces."""
        return (self.size, self.model, self.library, self.way, self.dtype, self.measure, self.batch, self.tokens,
                self.part)  # fmt: skip

    @property
    def name(self) -> str:
        """Model and library, for tables and legends."""
        return f"{self.model} ({self.library})"

    def measured(self, measure: str, value: Spread | float, part: str = "") -> ModelRow:
        """The same row with a number."""
        row = replace(self, measure=measure, part=part)
        if isinstance(value, Spread):
            return replace(row, value=value.median, low=value.low, high=value.high, samples=value.count)
        return replace(row, value=float(value), samples=1)

    def failed(self, measure: str, error: BaseException) -> ModelRow:
        """The same row with the reason why there is no number: class and first line."""
        lines = str(error).strip().splitlines()
        return replace(self, measure=measure, error=f"{type(error).__name__}: {lines[0] if lines else ''}"[:300])


@dataclass
class ModelResults:
    """The content of one or several result files; a later row with the same key replaces an earlier one."""

    runs: dict[str, Run] = field(default_factory=dict)
    rows: dict[tuple[object, ...], ModelRow] = field(default_factory=dict)

    def add(self, row: ModelRow) -> None:
        """Adds or replaces a row; ValueError for an unknown measure, KeyError for an unknown run."""
        if row.measure not in MEASURES:
            raise ValueError(unknown("measure", row.measure, MEASURES))
        if row.run not in self.runs:
            raise KeyError(f"row of run {row.run!r}, which the results do not describe")
        self.rows[row.key] = row

    def of(self, measure: str) -> list[ModelRow]:
        """All rows of a measure, in the order of their settings."""
        rows = [row for row in self.rows.values() if row.measure == measure]
        return sorted(rows, key=lambda row: (row.tokens, row.batch, row.library != "deltazoo", row.name, row.way))

    def save(self, path: Path) -> None:
        """Writes atomically, so that a run that is killed leaves the rows measured so far."""
        write_rows(path, SCHEMA, self.runs.values(), self.rows.values())


def load_model_results(paths: Iterable[Path]) -> ModelResults:
    """Reads and merges result files, later runs last.

    Raises:
        ValueError: a file that is not one of ours, naming the file and what is wrong with it.
    """
    files = []
    for path in paths:
        try:
            content = json.loads(path.read_text())
            if content["schema"] != SCHEMA:
                raise ValueError(f"schema {content['schema']}, expected {SCHEMA}")
            one = ModelResults({run["id"]: Run(**run) for run in content["runs"]})
            for row in content["rows"]:
                one.add(ModelRow(**row))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a result of `deltazoo bench model`: {error}") from error
        files.append(one)
    merged = ModelResults()
    for one in files:
        merged.runs.update(one.runs)
    rows = [row for one in files for row in one.rows.values()]
    for row in sorted(rows, key=lambda row: merged.runs[row.run].date):
        merged.add(row)
    return merged
