"""Writes the measured part of docs/coming_from_fla.md from the results of compare_fla_layers.py.

    python scripts/render_fla_layers.py

The part stands between two marked lines of the page; the rest of the page stays as it is.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.markdown import table, with_part

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fla_layers_h200.json"
PAGE = ROOT / "docs" / "coming_from_fla.md"
BEGIN = "<!-- measured: written by scripts/render_fla_layers.py from benchmarks/results/fla_layers_h200.json -->"
PHASES = {"forward_ms": "forward", "training_ms": "forward and backward"}


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)


def page(text: str) -> str:
    """The page with its measured part made again."""
    return with_part(text, BEGIN, measured(json.loads(RESULTS.read_text(encoding="utf-8"))))


def measured(content: dict[str, Any]) -> str:
    """What the result file has to say."""
    run, rows = content["run"], content["rows"]
    first = rows[0]
    parts = [
        "## Their layers on our functions\n",
        "flash-linear-attention's own layers, with its functions and with ours in place of them "
        "(`scripts/compare_fla_layers.py`):\n",
        f"{run['gpu']}, torch {run['torch']}, Triton {run['triton']}, flash-linear-attention {run['fla']}, "
        f"{run['date'][:10]}, commit `{run['commit'][:10]}`. {first['batch']} x {first['tokens']:,} tokens, width "
        f"{first['hidden_size']:,}, {first['heads']} heads of {first['head_dim']}, {first['dtype']}, eager mode; "
        "medians of three rounds in turns.\n",
        table(["layer", "what", "theirs, ms", "ours, ms", "times"], speed_rows(rows), text_columns=2),
        table(["layer", "peak in training, theirs, MiB", "ours, MiB"], memory_rows(rows), text_columns=1),
        "Errors relative to the same layer in float32, root mean square of the difference over that of the values: of "
        'the output, and the largest of the gradients of the input and all parameters. "Between" is the difference of '
        "the two in bfloat16.\n",
        table(["layer", "what", "theirs", "ours", "between"], error_rows(rows), text_columns=2),
        *(f"{sentence}\n" for sentence in failures(rows)),
    ]
    return "\n".join(parts)


def speed_rows(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        for key, phase in PHASES.items():
            theirs, ours = (row[way].get(key) for way in ("theirs", "ours"))
            times = f"{theirs['median'] / ours['median']:.2f}" if theirs and ours else ""
            yield [row["layer"], phase, *(f"{x['median']:.2f}" if x else "raises" for x in (theirs, ours)), times]


def memory_rows(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        peaks = [row[way].get("training_mib") for way in ("theirs", "ours")]
        yield [row["layer"], *(f"{x:,.0f}" if x else "" for x in peaks)]


def error_rows(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        columns = [row["theirs"]["errors"], row["ours"]["errors"], row.get("differences", {})]
        yield [row["layer"], "output", *(f"{x['output']:.4f}" if x else "" for x in columns)]
        gradients = [[value for name, value in x.items() if name != "output"] for x in columns]
        yield [row["layer"], "largest of the gradients", *(f"{max(x):.4f}" if x else "" for x in gradients)]


def failures(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for key, message in row["theirs"].get("failed", {}).items():
            yield f"{row['layer']}, {PHASES[key]}, on their functions: `{message}`"


if __name__ == "__main__":
    main()
