"""Colours, figures and files of all pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["BLACK", "BLUE", "GREEN", "GREY", "ORANGE", "PALETTE", "PINK", "SKY", "YELLOW", "new_figure", "save_figure"]

# Okabe and Ito's palette, distinguishable with every common colour vision deficiency, and a grey.
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK = PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
)  # fmt: skip
GREY = "#8C8C8C"


def new_figure(panels: int, *, width: float, height: float, columns: int | None = None) -> tuple[Any, list[Any]]:
    """A figure, sizes in inches, and its panels side by side, `columns` in a row; it needs no display."""
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
