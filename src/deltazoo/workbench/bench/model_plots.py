"""Plots of whole-model speed. Colour tells model and library, dash and marker how it ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltazoo.workbench.bench.model_results import ModelRow

__all__ = ["draw_bars", "draw_lines"]

# Okabe and Ito's palette, distinguishable with every common colour vision deficiency.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")
_LEGEND_COLUMNS = 2
_WIDE = 20  # values whose largest is this many times the smallest need a logarithmic axis


def draw_lines(path: Path, lines: dict[tuple[str, str], list[tuple[int, float]]], xlabel: str, ylabel: str) -> bool:
    """Draw lines of (place, value) by model and kind; False, and no file, for fewer than two places.

    Places are on a logarithmic axis. Values are too where they differ much; otherwise their axis starts at zero, so
    that a flat line looks flat.
    """
    if len({place for points in lines.values() for place, _ in points}) < 2:
        return False
    names, kinds = _places(name for name, _ in lines), _places(kind for _, kind in lines)
    figure, axis = _figure(height=4.6 + 0.2 * len(lines) / _LEGEND_COLUMNS)
    for name, kind in sorted(lines, key=lambda line: names[line[0]]):
        place = kinds[kind]
        axis.plot(*zip(*sorted(lines[name, kind]), strict=True), label=f"{name}, {kind}",
                  color=_COLOURS[names[name] % len(_COLOURS)], linestyle=_DASHES[place % len(_DASHES)],
                  marker=_MARKERS[place % len(_MARKERS)], markerfacecolor="white")  # fmt: skip
    axis.set_xscale("log", base=2)
    values = [value for points in lines.values() for _, value in points]
    if max(values) >= _WIDE * min(values):
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.06 * max(values))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    ticks = sorted({place for points in lines.values() for place, _ in points})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.grid(True, which="major", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize=7, handlelength=3.5)
    _save(figure, path)
    return True


def draw_bars(path: Path, rows: list[ModelRow], xlabel: str) -> bool:
    """Draw one bar per model and way, cut into the parts of its rows; False, and no file, without rows."""
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.value is not None:
            bars.setdefault(f"{row.name}, {row.way}", {})[row.part] = row.value
    if not bars:
        return False
    parts = _places(part for bar in bars.values() for part in sorted(bar))
    figure, axis = _figure(height=1.2 + 0.6 * len(bars))
    left = dict.fromkeys(bars, 0.0)
    for part, place in parts.items():
        widths = [bar.get(part, 0.0) for bar in bars.values()]
        axis.barh(list(bars), widths, left=list(left.values()), color=_COLOURS[place % len(_COLOURS)], label=part,
                  hatch="//" if place >= len(_COLOURS) else None)  # fmt: skip
        left = {name: left[name] + width for name, width in zip(bars, widths, strict=True)}
    axis.set(xlabel=xlabel, xlim=(0, 1.02 * max(left.values())))
    axis.invert_yaxis()
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), handlelength=4)
    _save(figure, path)
    return True


def _places(names: Any) -> dict[str, int]:
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
