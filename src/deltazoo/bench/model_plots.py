"""Plots of whole-model speed. Colour tells model and library, the dash the way it ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltazoo.bench.model_results import ModelRow

__all__ = ["draw_bars", "draw_lines"]

# Okabe and Ito's palette, distinguishable with every common colour vision deficiency.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")


def draw_lines(path: Path, rows: list[ModelRow], along: Callable[[ModelRow], int], xlabel: str, ylabel: str) -> bool:
    """Draw the rows' values against `along`, one line per model and way; False, and no file, for fewer than two places.

    Both axes are logarithmic.
    """
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row.value is not None:
            lines.setdefault((row.name, row.way), []).append((along(row), row.value))
    if len({place for points in lines.values() for place, _ in points}) < 2:
        return False
    names, ways = _places(name for name, _ in lines), _places(way for _, way in lines)
    figure, axis = _figure()
    for (name, way), points in lines.items():
        colour, dash = _COLOURS[names[name] % len(_COLOURS)], _DASHES[ways[way] % len(_DASHES)]
        axis.plot(*zip(*sorted(points), strict=True), color=colour, linestyle=dash, marker="o", label=f"{name}, {way}")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({place for points in lines.values() for place, _ in points})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(fontsize=8)
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
    axis.set(xlabel=xlabel)
    axis.invert_yaxis()
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, path)
    return True


def _places(names: Any) -> dict[str, int]:
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def _figure(height: float = 4.6) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
