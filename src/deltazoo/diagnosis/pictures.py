"""Pictures: the figures of a diagnosis, the losses of a run and of a distillation. matplotlib is an extra."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltazoo.diagnosis.rule_figures import CHUNK

# Okabe and Ito's palette, distinguishable with every common colour vision deficiency, and a grey.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, ORANGE, BLACK, GREY = PALETTE[0], PALETTE[1], PALETTE[-1], "#8C8C8C"

_MAPS: tuple[tuple[str, str, tuple[float, float] | None], ...] = (
    ("largest erase gain", "gain_max", (0.0, 2.0)),
    (f"norm of {CHUNK} transitions", "chunk_norm", (0.0, 2.0)),
    ("half-life, tokens", "half_life_median", None),
    ("step gate saturated", "step_gate_saturated", (0.0, 1.0)),
    ("output gate saturated", "output_gate_saturated", (0.0, 1.0)),
)
"""Title, figure, and limits of the colours; None: the limits of the values, on a logarithmic scale."""
_PANEL = 4.6  # inches
_LOSSES = {
    "align": "relative squared error of a layer",
    "distill": "KL to the original and\nweighted text loss, nats",
    "finetune": "loss on text, nats per token",
}


def require_matplotlib() -> None:
    """Raise ImportError with the line to install unless matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib: pip install '.[plots]' in a checkout of deltazoo, or elsewhere "
            "pip install matplotlib"
        ) from error


def new_figure(panels: int, *, width: float, height: float, columns: int | None = None) -> tuple[Any, list[Any]]:
    """A figure, sizes in inches, and its panels side by side, `columns` in a row; it needs no display."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    columns = columns or panels
    axes = list(figure.subplots(-(-panels // columns), columns, squeeze=False).flat)
    for axis in axes:
        axis.grid(True, alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: Path, *, dpi: int = 110) -> Path:
    """Write a PNG without the library's version in it, so that equal pictures are equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, metadata={"Software": None})
    return path


def draw_records(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Path of a PNG with `Diagnosis.records()`. Grey: the rule does not have the figure; orange: beyond the scale."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import MaxNLocator

    colours = colormaps["viridis"].with_extremes(over=ORANGE)
    layers = list(dict.fromkeys(record["layer"] for record in records))
    figure, axes = new_figure(6, columns=3, width=10.5, height=6.2)
    for axis, (title, name, limits) in zip(axes, _MAPS, strict=False):
        values = np.full((1 + max(record["head"] for record in records), len(layers)), math.nan)
        for record in records:
            values[record["head"], layers.index(record["layer"])] = record.get(name)  # None becomes NaN
        axis.set(title=title, xlabel="layer", ylabel="head")
        if np.isnan(values).all():
            axis.set(xticks=[], yticks=[])
            axis.text(0.5, 0.5, "not in these rules", ha="center", va="center", transform=axis.transAxes)
            continue
        lowest, highest = limits or _extremes(values)
        norm: Any = Normalize(lowest, highest) if limits else LogNorm(lowest, max(highest, 10 * lowest))
        axis.set_facecolor("#D0D0D0")
        axis.grid(False)
        image = axis.imshow(values, norm=norm, cmap=colours, aspect="auto", origin="lower", interpolation="none")
        beyond = limits is not None and bool((values > norm.vmax).any())
        figure.colorbar(image, ax=axis, extend="max" if beyond else "neither")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(MaxNLocator(integer=True))
    _draw_states(axes[-1], records, layers)
    return save_figure(figure, path)


def _extremes(values: NDArray[np.float64]) -> tuple[float, float]:
    """The smallest and the largest finite positive value; ones if there is none."""
    positive = values[np.isfinite(values) & (values > 0)]
    return (float(positive.min()), float(positive.max())) if positive.size else (1.0, 1.0)


def _draw_states(axis: Any, records: Sequence[Mapping[str, Any]], layers: Sequence[str]) -> None:
    """Draw a line per layer: the norm of its largest head."""
    largest = 1.0
    for number, layer in enumerate(layers):
        norms = np.array([record["state_norms"] for record in records if record["layer"] == layer]).max(axis=0)
        tokens = CHUNK * (1 + np.arange(len(norms)))
        axis.plot(
            tokens,
            norms,
            marker="." if len(norms) < 20 else "",
            color=PALETTE[number % len(PALETTE)],
            label=str(number),
        )
        lowest, highest = _extremes(norms)
        largest = max(largest, highest / lowest)
    axis.set(title="norm of the state, largest head", xlabel="tokens", yscale="log" if largest > 10 else "linear")
    if len(layers) <= len(PALETTE):
        axis.legend(title="layer", frameon=False, fontsize="small", ncols=2)  # outside it would move the colour bar


def curves(log_history: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Pairs ``(step, loss in nats per token)`` of both losses in the Trainer's log history."""
    return {
        name: [(int(entry["step"]), float(entry[key])) for entry in log_history if key in entry]
        for name, key in (("training", "loss"), ("validation", "eval_loss"))
    }


def draw_loss_curve(log_history: Sequence[dict[str, Any]], path: str | Path, title: str, tokens_per_step: int) -> Path:
    """Path of a PNG with both losses of a run, which is drawn.

    Args:
        tokens_per_step: tokens per optimizer step, for the upper axis.
    """
    found = curves(log_history)
    figure, [axes] = new_figure(1, width=8, height=4.5)
    axes.plot(*zip(*found["training"], strict=True), color=BLUE, linewidth=1.5, label="training")
    if found["validation"]:
        axes.plot(*zip(*found["validation"], strict=True), "o--", color=ORANGE, markersize=4, label="validation")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.legend(frameon=False)
    millions = tokens_per_step / 1e6
    scale = (lambda x: np.multiply(x, millions)), (lambda x: np.divide(x, millions))
    tokens = axes.secondary_xaxis("top", functions=scale)
    tokens.set_xlabel("training tokens (millions)")
    return save_figure(figure, Path(path), dpi=150)


def draw_distillation(
    path: Path, histories: Mapping[str, Sequence[Mapping[str, Any]]], scores: Mapping[str, float], title: str
) -> Path:
    """Path of a PNG with a panel per stage: its loss on the left axis, held-out bits per byte on the right.

    Args:
        histories: the Trainer's log history by stage, in the order of the stages.
        scores: bits per byte of all held-out rows, for ``original``, ``transfer`` and each stage. The Trainer's
            history has those of some rows, which may differ slightly.
    """
    count = len(histories)
    columns = min(5, 2 * count - 1)  # columns of the legend, which in one line is as wide as three panels
    figure, panels = new_figure(count, width=_PANEL * count, height=3.9 + 0.3 * math.ceil(5 / columns))
    rights = [axis.twinx() for axis in panels]
    for axis, right, (stage, history) in zip(panels, rights, histories.items(), strict=True):
        losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
        bits = [(entry["step"], entry["eval_bits_per_byte"]) for entry in history if "eval_bits_per_byte" in entry]
        axis.plot(*zip(*losses, strict=True), color=BLUE, linewidth=1.5, label="the stage's loss (left)")
        right.plot(*zip(*bits, strict=True), "o--", color=ORANGE, markersize=4, label="held-out, some rows (right)")
        star = {"color": ORANGE, "markersize": 13, "clip_on": False}  # drawn whole, also on the edge
        right.plot(losses[-1][0], scores[stage], "*", label="held-out, all rows (right)", **star)
        right.axhline(scores["original"], color=BLACK, linestyle=":", label="original, all rows (right)")
        right.axhline(scores["transfer"], color=GREY, linestyle="-.", label="after transfer, all rows (right)")
        axis.set(xlabel="optimizer step", title=stage)
        axis.set_ylabel(_LOSSES[stage], color=BLUE)
        right.set_ylabel("held-out bits per byte", color=ORANGE)
    low = min(axis.get_ylim()[0] for axis in rights)
    high = max(axis.get_ylim()[1] for axis in rights)
    for right in rights:
        right.set_ylim(low, high)
    lines = [*panels[0].get_lines(), *rights[0].get_lines()]
    figure.legend(lines, [line.get_label() for line in lines], loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(textwrap.fill(title, 44 * count))
    return save_figure(figure, path, dpi=150)
