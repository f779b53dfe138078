"""Colours, figures and files of all pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["BLACK", "BLUE", "GREY", "ORANGE", "PALETTE", "new_figure", "require_matplotlib", "save_figure"]

# Okabe and Ito's palette, distinguishable with every common colour vision deficiency, and a grey.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, ORANGE, BLACK, GREY = PALETTE[0], PALETTE[1], PALETTE[-1], "#8C8C8C"


def require_matplotlib() -> None:
    """Raise ImportError with the line to install, unless matplotlib is there."""
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
