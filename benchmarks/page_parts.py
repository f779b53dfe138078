"""What both benchmark pages share: letters for runs, the table of runs, and sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import ascii_lowercase
from typing import Any

from benchmarks.markdown import table
from benchmarks.provenance import Run
from benchmarks.result_files import Results

__all__ = ["enumerated", "run_letters", "runs_section"]


def run_letters(results: Results[Any]) -> dict[str, str]:
    """A letter for every run that has rows, by id, oldest first."""
    used = {row.run for row in results.rows.values()}
    ordered = sorted((run for run in results.runs.values() if run.id in used), key=lambda run: run.date)
    return {run.id: ascii_lowercase[i] if i < 26 else str(i) for i, run in enumerate(ordered)}


def runs_section(results: Results[Any], columns: dict[str, Callable[[Run], str | None]]) -> str:
    """Letter, date and commit of every run, and further columns."""
    rows = []
    for id, letter in run_letters(results).items():
        run = results.runs[id]
        cells = [letter, run.date[:16].replace("T", " "), f"`{run.short_commit}`"]
        rows.append([*cells, *(value(run) or "" for value in columns.values())])
    return "## Runs\n\n" + table(["run", "date (UTC)", "commit", *columns], rows)


def enumerated(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
