"""Plots of the sweep over sequence lengths. Colour tells the library, marker and dash the operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.lower_bound import Ceilings, lower_bound_ms
from benchmarks.operator_results import OperatorResults, OperatorRow
from benchmarks.shapes import SWEEP, Shape
from deltazoo.training.figures import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, YELLOW, new_figure, save_figure

__all__ = ["draw_plots", "share_of_lower_bound"]

_COLOURS = {"deltazoo": BLUE, "fla": ORANGE, "sdpa": BLACK, "fla-safe-gate": YELLOW}
_OTHER_COLOURS = (GREEN, PINK, SKY)
_STYLES = {"delta": ("o", "-"), "gdn": ("s", "--"), "kda": ("^", "-."), "softmax": ("x", ":")}


def share_of_lower_bound(results: OperatorResults, row: OperatorRow) -> float | None:
    """Lower bound over measured time. None for softmax, without a value or in a run without measured hardware rates."""
    run = results.runs[row.run]
    if row.value is None or row.op == "softmax" or run.copy_tb_s is None or run.matmul_tflop_s is None:
        return None
    ceilings = Ceilings(run.copy_tb_s, run.matmul_tflop_s)
    shape, backward = Shape.parse(row.shape), "backward" in row.measure
    return lower_bound_ms(shape, row.op, backward=backward, ceilings=ceilings) / row.value


def draw_plots(results: OperatorResults, folder: Path) -> dict[str, Path]:
    """Draws `time`, `share` and `memory`, each if at least two lengths were measured; returns the PNG files by name."""
    passes = {"forward_ms": "forward", "forward_backward_ms": "forward and backward"}
    wanted: dict[str, tuple[dict[str, str], str, Callable[[OperatorRow], float | None]]] = {
        "time": (passes, "milliseconds", lambda row: row.value),
        "share": (
            passes,
            "percent of the speed the hardware allows",
            lambda row: _percent(share_of_lower_bound(results, row)),
        ),
        "memory": ({"peak_mib": "forward and backward"}, "MiB above the inputs", lambda row: row.value),
    }
    drawn = {}
    for name, (panels, label, value_of) in wanted.items():
        lines = {measure: _lines(results, measure, value_of) for measure in panels}
        if any(len(points) > 1 for panel in lines.values() for points in panel.values()):
            drawn[name] = folder / f"{name}.png"
            _draw(drawn[name], panels, lines, label, logarithmic=name != "share")
    return drawn


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


_Lines = dict[tuple[str, str], list[tuple[int, float]]]


def _lines(results: OperatorResults, measure: str, value_of: Callable[[OperatorRow], float | None]) -> _Lines:
    """`{(library, op): [(T, value), ...]}` over the sweep, gates medium where there are gates."""
    lines: _Lines = {}
    for shape in SWEEP:
        for row in results.rows.values():
            if (row.shape, row.measure) == (str(shape), measure) and row.gates in ("none", "medium"):
                value = value_of(row)
                if value is not None:
                    lines.setdefault((row.library, row.op), []).append((shape.T, value))
    return dict(sorted(lines.items()))


def _draw(path: Path, panels: dict[str, str], lines: dict[str, _Lines], label: str, *, logarithmic: bool) -> None:
    figure, axes = new_figure(len(panels), width=6.0 * len(panels), height=4.6)
    others = {name for panel in lines.values() for name, _ in panel if name not in _COLOURS}
    colours = {**_COLOURS, **dict(zip(sorted(others), _OTHER_COLOURS * len(others), strict=False))}
    for axis, (measure, title) in zip(axes, panels.items(), strict=True):
        for (library, op), points in lines[measure].items():
            marker, dash = _STYLES[op]
            name = library if op == "softmax" else f"{library} {op}"
            axis.plot(*zip(*points, strict=True), color=colours[library], marker=marker, linestyle=dash, label=name)
        axis.set_xscale("log", base=2)
        ticks = [shape.T for shape in SWEEP]
        axis.set_xticks(ticks, [f"{T // 1024}k" if T >= 1024 else str(T) for T in ticks])
        if logarithmic:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set(title=title, xlabel="tokens T (one sequence, 16 heads, K = V = 128)", ylabel=label)
        if lines[measure]:
            axis.legend(fontsize=9, frameon=False)
    save_figure(figure, path, dpi=150)
