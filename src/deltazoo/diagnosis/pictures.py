"""Colours, figures and files of all pictures, and the picture of a diagnosis. matplotlib is an extra.

A diagnosis is a heat map, layers by heads, for each figure, and the states over the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltazoo.diagnosis.rule_figures import CHUNK, figure_of

__all__ = [
    "BLACK",
    "BLUE",
    "GREY",
    "ORANGE",
    "PALETTE",
    "draw_records",
    "new_figure",
    "require_matplotlib",
    "save_figure",
]

# Okabe and Ito's palette, distinguishable with every common colour vision deficiency, and a grey.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, ORANGE, BLACK, GREY = PALETTE[0], PALETTE[1], PALETTE[-1], "#8C8C8C"

Record = Mapping[str, Any]


_MAPS: tuple[tuple[str, str, tuple[float, float] | None], ...] = (
    ("largest erase gain", "gain_max", (0.0, 2.0)),
    (f"norm of {CHUNK} transitions", "chunk_norm", (0.0, 2.0)),
    ("half-life, tokens", "half_life_median", None),
    ("step gate saturated", "step_gate_saturated", (0.0, 1.0)),
    ("output gate saturated", "output_gate_saturated", (0.0, 1.0)),
)
"""Title, figure, and limits of the colours; None: the limits of the values, on a logarithmic scale."""


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


def draw_records(records: Sequence[Record], path: Path) -> Path:
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
            found = figure_of(record, name)
            if found is not None:
                values[record["head"], layers.index(record["layer"])] = found
        axis.set(title=title, xlabel="layer", ylabel="head")
        if np.isnan(values).all():
            axis.set(xticks=[], yticks=[])
            axis.text(0.5, 0.5, "not in these rules", ha="center", va="center", transform=axis.transAxes)
            continue
        norm: Any = Normalize(*limits) if limits else LogNorm(*_range(values[np.isfinite(values) & (values > 0)]))
        axis.set_facecolor("#D0D0D0")
        axis.grid(False)
        image = axis.imshow(values, norm=norm, cmap=colours, aspect="auto", origin="lower", interpolation="none")
        beyond = limits is not None and bool((values > norm.vmax).any())
        figure.colorbar(image, ax=axis, extend="max" if beyond else "neither")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(MaxNLocator(integer=True))
    _draw_states(axes[-1], records, layers)
    return save_figure(figure, path)


def _range(values: NDArray[np.float64]) -> tuple[float, float]:
    """Limits of a logarithmic scale, at least a factor of 10 apart."""
    if not values.size:
        return 1.0, 10.0
    smallest, largest = float(values.min()), float(values.max())
    return smallest, max(largest, 10 * smallest)


def _draw_states(axis: Any, records: Sequence[Record], layers: Sequence[str]) -> None:
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
        finite = norms[np.isfinite(norms) & (norms > 0)]
        largest = max(largest, float(finite.max() / finite.min()) if finite.size else 1.0)
    axis.set(title="norm of the state, largest head", xlabel="tokens", yscale="log" if largest > 10 else "linear")
    if len(layers) <= len(PALETTE):
        axis.legend(title="layer", frameon=False, fontsize="small", ncols=2)  # outside it would move the colour bar
