"""Draws docs/images/speed_and_memory.png, the README's picture, from the operators' result files.

    python scripts/render_readme_picture.py

All bars are from one run: the newest one that trained at the table's shape `train` and has rows of deltazoo and fla for
every rule and of sdpa; with FlashQLA if it has that too. Where flash-linear-attention fails on its own kernels, its bar
shows it with TileLang's, if that run has them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.operator_results import OperatorResults, OperatorRow
from benchmarks.provenance import Run
from benchmarks.shapes import TABLE
from deltazoo.training.figures import BLUE, GREY, ORANGE, PINK, new_figure, save_figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "speed_and_memory.png"
SHAPE = TABLE["train"]
RULES = {"delta": "DeltaNet", "gdn": "Gated DeltaNet", "kda": "KDA", "softmax": "softmax attention"}
LIBRARIES = {
    "deltazoo": ("deltazoo", BLUE),
    "fla": ("flash-linear-attention", ORANGE),
    "flashqla": ("FlashQLA", PINK),
    "sdpa": ("torch SDPA", GREY),
}
NEEDED = {("softmax", "sdpa")} | {
    (rule, library) for rule in ("delta", "gdn", "kda") for library in ("deltazoo", "fla")
}
PANELS = {"forward_backward_ms": ("time", "ms"), "peak_mib": ("peak memory above the inputs", "MiB")}


@dataclass(frozen=True)
class Bar:
    """One implementation of one rule; a value is None where it gave no result. `note` follows the values."""

    rule: str
    library: str
    values: dict[str, float | None]
    note: str = ""


def collect(paths: Iterable[Path]) -> tuple[Run, list[Bar]]:
    """The newest run that has all of `NEEDED`, and its bars in the order of `RULES` and `LIBRARIES`.

    Raises:
        ValueError: no run has them all.
    """
    runs: dict[str, Run] = {}
    rows: dict[str, dict[tuple[str, str], dict[str, OperatorRow]]] = {}
    for path in paths:
        results = OperatorResults.load([path])
        runs |= results.runs
        for row in results.rows.values():
            known = row.library in (*LIBRARIES, "fla-tilelang") and row.gates in ("none", "medium")
            if known and row.shape == str(SHAPE) and row.measure in PANELS:
                rows.setdefault(row.run, {}).setdefault((row.op, row.library), {})[row.measure] = row
    complete = [run for run, found in rows.items() if found.keys() >= NEEDED]
    if not complete:
        raise ValueError(f"no run has deltazoo and fla for every rule and sdpa at {SHAPE}")
    newest = max(complete, key=lambda run: runs[run].date)
    found = rows[newest]
    bars = [bar(op, library, found) for op in RULES for library in LIBRARIES if (op, library) in found]
    return runs[newest], bars


def bar(op: str, library: str, found: dict[tuple[str, str], dict[str, OperatorRow]]) -> Bar:
    """The bar of one library; of flash-linear-attention with TileLang where it fails without."""
    rows, other = found[op, library], found.get((op, "fla-tilelang"))
    with_tilelang = library == "fla" and other is not None and any(row.error for row in rows.values())
    shown = other if with_tilelang and other is not None else rows
    values = {measure: row.value for measure, row in shown.items()}
    return Bar(op, library, values, " with TileLang" if with_tilelang else "")


def draw(path: Path, run: Run, bars: list[Bar]) -> Path:
    """Time and memory side by side, the rules one below the other."""
    figure, axes = new_figure(2, width=10, height=4.4)
    positions, middles = arrange(bars)
    for axis, (measure, (title, unit)) in zip(axes, PANELS.items(), strict=True):
        draw_panel(axis, positions, bars, measure, f"not with Triton {run.triton} alone")
        axis.set_title(f"{title}, {unit}", loc="left", fontsize=13)
    axes[0].set_yticks(list(middles.values()), [RULES[rule] for rule in middles], fontsize=12)
    axes[1].set_yticks([])
    drawn = {bar.library for bar in bars}
    handles = [axes[0].barh(0, 0, color=c, label=name) for key, (name, c) in LIBRARIES.items() if key in drawn]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=12, frameon=False)
    figure.supxlabel(
        f"forward and backward pass of one call, {SHAPE.B} x {SHAPE.T:,} tokens, {SHAPE.H} heads of {SHAPE.K}, "
        f"bfloat16, {run.gpu}; shorter is better",
        fontsize=10,
    )
    return save_figure(figure, path, dpi=160)


def arrange(bars: list[Bar]) -> tuple[list[float], dict[str, float]]:
    """Height of every bar from above, with a gap between rules; and of the middle of every rule."""
    positions: list[float] = []
    of_rule: dict[str, list[float]] = {}
    for bar in bars:
        gap = 0.0 if not positions else 1.0 if bar.rule in of_rule else 1.6
        positions.append(positions[-1] + gap if positions else 0.0)
        of_rule.setdefault(bar.rule, []).append(positions[-1])
    return positions, {rule: sum(found) / len(found) for rule, found in of_rule.items()}


def draw_panel(axis: Any, positions: list[float], bars: list[Bar], measure: str, missing: str) -> None:
    """Bars with their values beside them, or with the text `missing`."""
    for position, bar in zip(positions, bars, strict=True):
        value = bar.values[measure]
        text = missing if value is None else (f"{value:.2f}" if value < 100 else f"{value:,.0f}") + bar.note
        axis.barh(position, value or 0.0, height=0.9, color=LIBRARIES[bar.library][1])
        style = {
            "color": LIBRARIES[bar.library][1] if value is None else "black",
            "weight": "bold" if bar.library == "deltazoo" else "normal",
        }
        axis.text(value or 0.0, position, f" {text}", va="center", fontsize=12, **style)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.14 * max(bar.values[measure] or 0.0 for bar in bars))
    axis.grid(False)
    axis.spines[["bottom"]].set_visible(False)
    axis.tick_params(bottom=False, labelbottom=False, left=False)


def main() -> int:
    try:
        run, bars = collect(sorted(RESULTS.glob("ops_*.json")))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(draw(PICTURE, run, bars))
    return 0


if __name__ == "__main__":
    sys.exit(main())
