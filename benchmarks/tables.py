"""Markdown tables of result files, on standard output.

    python -m benchmarks.tables benchmarks/results/operators_h200.json --only measure=forward_graph_ms
    python -m benchmarks.tables FILE --only batch=1 library=deltazoo --columns model way decode_tok_s

Rows with a measure and a value become one row per setting and one column per measure. What is the same in all rows
stands above the table, with the runs that measured them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SAID_ELSEWHERE = ("low", "high", "samples", "note", "run", "id")


def tables_in(path: Path) -> Iterator[tuple[str, list[Row], list[Row]]]:
    """Title, rows and runs of every list of rows in a file, one for each `kind` of rows."""
    text = path.read_text(encoding="utf-8")
    content = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
    if isinstance(content, list):  # rows, and in some files runs between them
        runs = [row["run"] for row in content if isinstance(row.get("run"), dict)]
        content = {"runs": runs, "rows": [row for row in content if not isinstance(row.get("run"), dict)]}
    runs = content.get("runs") or [content.get("run", {})]
    if isinstance(runs, list) and runs and "rows" in runs[0]:  # rows of every run for themselves
        rows = [{"label": run["label"], **row} for run in runs for row in run["rows"]]
        content, runs = {"rows": rows}, [run["run"] for run in runs]
    for name, rows in content.items():
        if name == "runs" or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            continue
        for kind in dict.fromkeys(row.get("kind") for row in rows):
            found = [{k: v for k, v in row.items() if k != "kind"} for row in rows if row.get("kind") == kind]
            used = {row.get("run") for row in found}
            yield kind or name, found, [run for run in runs if run.get("id") in used] or runs


def flat(row: Row, before: str = "") -> Row:
    """Without dictionaries in it: `after.low` for the key `low` of `after`."""
    found: Row = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{key}.")
        elif isinstance(value, list):
            found[before + key] = ", ".join(map(text_of, value))
        else:
            found[before + key] = value
    return found


def text_of(value: Any) -> str:
    """A cell: numbers with four digits at least, and commas in thousands."""
    if value is None or isinstance(value, str):
        return (value or "").replace("|", "\\|")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def merged(rows: list[Row]) -> list[Row]:
    """One row per setting, with a column per measure."""
    if not all({"measure", "value"} <= row.keys() or "error" in row for row in rows):
        return rows
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        setting = {k: v for k, v in row.items() if k not in (*SAID_ELSEWHERE, "measure", "value", "error", "peak_gib")}
        into = found.setdefault(tuple(setting.items()), setting)
        into[row.get("measure", "error")] = row.get("error") or row["value"]
        if row.get("peak_gib") is not None:
            into["peak_gib"] = row["peak_gib"]
    return list(found.values())


def table(rows: list[Row], columns: list[str] | None = None) -> str:
    """Markdown, under a line of what all rows have in common."""
    rows = [flat(row) for row in merged(rows)]
    names = list(dict.fromkeys(name for row in rows for name in row if name not in SAID_ELSEWHERE))
    shown = {name: [text_of(row.get(name)) for row in rows] for name in names}
    same = {name: cells[0] for name, cells in shown.items() if len(rows) > 1 and len(set(cells)) == 1}
    names = columns or [name for name in names if name not in same]
    lines = [", ".join(f"{name}: {cell}" for name, cell in same.items() if cell and name not in names), ""] * bool(same)
    right = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in names]
    lines += [f"| {' | '.join(names)} |", f"| {' | '.join('---:' if r else '---' for r in right)} |"]
    for number in range(len(rows)):
        lines.append(f"| {' | '.join(shown[name][number] if name in shown else '' for name in names)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="KEY=VALUE", help="rows that have these values")
    parser.add_argument("--columns", nargs="+", help="these columns, in this order")
    arguments = parser.parse_args()
    wanted = dict(condition.split("=", 1) for condition in arguments.only)
    for path in arguments.files:
        for title, rows, runs in tables_in(path):
            rows = [row for row in rows if all(str(row.get(key)) == value for key, value in wanted.items())]
            if rows:
                print(f"## {path.name}: {title}\n")
                for run in runs:
                    about = (
                        run.get(key) for key in ("gpu", "cpu", "torch", "triton", "transformers", "commit", "date")
                    )
                    print("*", ", ".join(str(value)[:24] for value in about if value))
                print(f"\n{table(rows, arguments.columns)}\n")


if __name__ == "__main__":
    main()
