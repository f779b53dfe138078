"""Plots of whole-model speed: lines with their names at the end, and bars cut into parts."""

from __future__ import annotations

from pathlib import Path

from benchmarks.model_results import ModelRow
from deltazoo.training.figures import PALETTE, new_figure, save_figure

__all__ = ["draw_bars", "draw_lines"]

_DASHES = ("-", "--")
_LOGARITHMIC_FROM = 20  # values whose largest is this many times the smallest need a logarithmic axis
_LABEL_HEIGHT = 0.045  # of the axis: labels at the ends of lines stand at least so far apart

Lines = dict[tuple[str, str], list[tuple[int, float]]]
"""(model, kind) -> points."""


def draw_lines(path: Path, lines: Lines, xlabel: str, ylabel: str, *, lower_is_better: bool = False) -> bool:
    """Draw one line per model; False, and no file, for fewer than two positions.

    Of several kinds of a model the one with most points is drawn, and of several such the best at its last point.
    Positions are on a logarithmic axis. Values are too where they differ much; otherwise their axis starts at zero, so
    that a flat line looks flat.
    """
    chosen = _one_per_model(lines, lower_is_better=lower_is_better)
    if not chosen:
        return False
    figure, [axis] = new_figure(1, width=9.0, height=max(4.2, 0.4 * len(chosen) + 1.5))
    values = [value for points in chosen.values() for _, value in points]
    axis.set_xscale("log", base=2)
    if max(values) >= _LOGARITHMIC_FROM * min(values):
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.06 * max(values))
    for index, points in enumerate(chosen.values()):
        colour, dash = PALETTE[index % len(PALETTE)], _DASHES[index // len(PALETTE) % len(_DASHES)]
        axis.plot(*zip(*points, strict=True), color=colour, linestyle=dash, marker="o", markersize=4)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    ticks = sorted({position for points in chosen.values() for position, _ in points})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30)
    axis.minorticks_off()
    axis.set(xlabel=xlabel, ylabel=ylabel)
    figure.draw_without_rendering()
    to_axis = axis.transData + axis.transAxes.inverted()
    ends = [to_axis.transform(points[-1])[1] for points in chosen.values()]
    for index, ((name, kind), height) in enumerate(zip(chosen, _spread_out(ends), strict=True)):
        colour = PALETTE[index % len(PALETTE)]
        axis.annotate(
            f"{name}, {kind}", (1.02, height), xycoords="axes fraction", color=colour, fontsize=9, va="center"
        )
    save_figure(figure, path, dpi=120)
    return True


def _one_per_model(lines: Lines, *, lower_is_better: bool) -> Lines:
    best: dict[str, tuple[tuple[int, float], tuple[str, str]]] = {}
    for (name, kind), points in lines.items():
        if len({position for position, _ in points}) > 1:
            last = max(points)[1]
            rank = (len(points), -last if lower_is_better else last)
            best[name] = max(best.get(name, (rank, (name, kind))), (rank, (name, kind)))
    return {line: sorted(lines[line]) for _, line in best.values()}


def _spread_out(heights: list[float]) -> list[float]:
    """The same heights, moved up where they would overlap."""
    moved = list(heights)
    below = -1.0
    for index in sorted(range(len(heights)), key=heights.__getitem__):
        moved[index] = below = max(heights[index], below + _LABEL_HEIGHT)
    return moved


def draw_bars(path: Path, rows: list[ModelRow], xlabel: str) -> bool:
    """Draw one bar per model and way, cut into the parts of its rows; False, and no file, without rows."""
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.value is not None:
            bars.setdefault(f"{row.name}, {row.way}", {})[row.part] = row.value
    if not bars:
        return False
    parts = dict.fromkeys(part for bar in bars.values() for part in sorted(bar))
    figure, [axis] = new_figure(1, width=9.0, height=1.2 + 0.6 * len(bars))
    left = dict.fromkeys(bars, 0.0)
    for number, part in enumerate(parts):
        widths = [bar.get(part, 0.0) for bar in bars.values()]
        axis.barh(list(bars), widths, left=list(left.values()), color=PALETTE[number % len(PALETTE)], label=part,
                  hatch="//" if number >= len(PALETTE) else None)  # fmt: skip
        left = {name: left[name] + width for name, width in zip(bars, widths, strict=True)}
    axis.set(xlabel=xlabel, xlim=(0, 1.02 * max(left.values())))
    axis.invert_yaxis()
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), handlelength=4, frameon=False)
    save_figure(figure, path, dpi=120)
    return True
