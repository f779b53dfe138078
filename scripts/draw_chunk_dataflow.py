"""Draws docs/images/chunk_dataflow.svg: what happens inside one chunk, and what passes from chunk to chunk.

    python scripts/draw_chunk_dataflow.py [--out docs/images/chunk_dataflow.svg]

Matrices are drawn to one scale (C = 64 tokens tall, K and V channels wide), so that shapes can be read off the picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

INK, QUIET, PAPER = "#1f2933", "#6b7785", "#ffffff"
INPUT, LOCAL, STATE, RESULT = "#9aa5b1", "#4f7cc4", "#e08a2e", "#3f9e6e"  # grey, blue, orange, green
INPUT_BAND, PARALLEL_BAND, SERIAL_BAND = "#f3f4f6", "#edf3fb", "#fdf3e7"
C, K, V, ONE = 1.0, 0.62, 0.86, 0.12  # drawn sizes of the chunk length, of the head dimensions, of a single number


def tint(color: str, strength: float = 0.28) -> tuple[float, float, float]:
    """The colour thinned towards white."""
    return tuple(1 - strength * (1 - c) for c in matplotlib.colors.to_rgb(color))


def matrix(ax: Axes, x: float, y: float, height: float, width: float, color: str, triangular: bool = False) -> None:
    """A matrix centred at (x, y), or only its lower triangle."""
    left, bottom = x - width / 2, y - height / 2
    frame = dict(edgecolor=color, linewidth=1.6, joinstyle="round")
    if not triangular:
        ax.add_patch(Rectangle((left, bottom), width, height, facecolor=tint(color), **frame))
        return
    zeros = frame | dict(facecolor=PAPER, linestyle=(0, (2, 2)), linewidth=1)
    ax.add_patch(Rectangle((left, bottom), width, height, **zeros))
    corners = [(left, bottom + height), (left + width, bottom), (left, bottom)]
    ax.add_patch(Polygon(corners, closed=True, facecolor=tint(color, 0.45), **frame))


def label(ax: Axes, x: float, y: float, text: str, size: float = 13, color: str = INK, **options: object) -> None:
    ax.text(x, y, text, fontsize=size, color=color, **{"ha": "center", "va": "center", **options})


def path(
    ax: Axes, points: list[tuple[float, float]], color: str, head: bool = True, width: float = 1.8, level: float = 1.5
) -> None:
    """A line through ``points``, with an arrow head at its end; of two that cross, the higher level is on top."""
    xs, ys = zip(*points, strict=True)
    if head:
        style = dict(arrowstyle="-|>,head_width=0.28,head_length=0.5", color=color, lw=width, shrinkA=0, shrinkB=0)
        ax.annotate("", xy=points[-1], xytext=points[-2], arrowprops=style)
    ax.plot(xs, ys, color=color, lw=width, solid_capstyle="round", solid_joinstyle="round", zorder=level)


def band(ax: Axes, x: float, y: float, width: float, height: float, color: str, edge: str = "none") -> None:
    shape = "round,pad=0,rounding_size=0.16"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=color, ec=edge, lw=1.8, zorder=0))


def draw_sequence(ax: Axes) -> None:
    """Four chunks of a sequence; preparation side by side, the state from left to right."""
    ax.set(xlim=(0, 17), ylim=(0, 3.05))
    band(ax, 0.1, 1.72, 16.8, 1.2, PARALLEL_BAND)
    band(ax, 0.1, 0.2, 16.8, 1.35, SERIAL_BAND)
    label(ax, 0.35, 2.32, "all chunks at once", 12, LOCAL, ha="left")
    label(ax, 0.35, 0.85, "one after another", 12, STATE, ha="left")
    path(ax, [(3.0, 0.85), (3.97, 0.85)], STATE, width=2.6)
    label(ax, 3.42, 1.12, "$S_0$", 13, STATE)
    for n in range(4):
        x = 4.95 + 3.0 * n
        for text, y, color in [("prepare", 2.32, LOCAL), ("step", 0.85, STATE)]:
            band(ax, x - 0.95, y - 0.33, 1.9, 0.66, PAPER, edge=color)
            label(ax, x, y, f"{text} {n + 1}")
        path(ax, [(x, 1.99), (x, 1.22)], LOCAL)
        path(ax, [(x + 0.98, 0.85), (x + 2.02, 0.85)], STATE, width=2.6)
        label(ax, x + 1.45, 1.12, f"$S_{n + 1}$", 13, STATE)
    label(ax, 16.42, 0.85, "final\nstate", 10.5, STATE, linespacing=1.15)


def draw_chunk(ax: Axes) -> None:
    """Inside one chunk: every chunk-local quantity stands above the product that uses it."""
    ax.set(xlim=(0, 17), ylim=(0.5, 9.55))
    band(ax, 0.1, 7.65, 16.8, 1.85, INPUT_BAND)
    band(ax, 0.1, 4.65, 16.8, 2.85, PARALLEL_BAND)
    band(ax, 0.1, 0.55, 16.8, 3.95, SERIAL_BAND)
    label(ax, 0.35, 9.2, "inputs", 12, QUIET, ha="left")
    label(ax, 0.35, 7.2, "prepare", 12, LOCAL, ha="left")
    label(ax, 0.35, 4.2, "step", 12, STATE, ha="left")
    draw_inputs(ax)
    draw_preparation(ax)
    draw_step(ax)


def draw_inputs(ax: Axes) -> None:
    inputs = [("$q$", 3.0, K), ("$k$", 4.6, K), ("$v$", 6.35, V), (r"$\beta$", 7.95, ONE), ("log decay", 9.5, K)]
    for name, x, width in inputs:
        matrix(ax, x, 8.72, C, width, INPUT)
        label(ax, x, 7.97, name)
    formulas = [
        "$G_i$ = sum of the log decays of tokens 1 to $i$",
        "entry $=e^{G_i}$,   exit $=e^{G_C-G_i}$,   total $=e^{G_C}$",
        r"$N_{ij}=\sum_c\,k_{ic}\,k_{jc}\,e^{G_{ic}-G_{jc}}$   for $j<i$",
    ]
    for y, formula in zip((9.1, 8.58, 8.02), formulas, strict=True):
        label(ax, 11.2, y, formula, 12, QUIET, ha="left")


def draw_preparation(ax: Axes) -> None:
    quantities = [
        (3.55, V, C, INPUT, False, "$v$", ""),
        (5.0, K, C, LOCAL, False, r"$K_{\mathrm{in}}$", r"entry$\,\circ k$"),
        (6.65, ONE, C, INPUT, False, r"$\beta$", ""),
        (8.1, C, C, LOCAL, True, "$A$", r"$(I+\beta\circ N)^{-1}$"),
        (10.05, K, C, LOCAL, False, r"$Q_{\mathrm{in}}$", r"entry$\,\circ q$"),
        (11.55, C, C, LOCAL, True, "$P$", r"as $N$, with $q_i$, $j\leq i$"),
        (14.0, K, C, LOCAL, False, r"$K_{\mathrm{out}}$", r"exit$\,\circ k$"),
        (15.5, ONE, K, LOCAL, False, "total", r"$e^{G_C}$"),
    ]
    for x, width, height, color, triangular, name, formula in quantities:
        matrix(ax, x, 6.6, height, width, color, triangular)
        label(ax, x, 5.78, name, 13.5)
        label(ax, x, 5.36, formula, 11.5, QUIET)


def draw_step(ax: Axes) -> None:
    lane, rail, gap = 3.1, 1.0, V / 2 + 0.08
    products = [
        (1.45, K, STATE, "$S$", "state entering"),
        (4.3, C, LOCAL, r"$X = v - K_{\mathrm{in}}\,S$", "what the state gets wrong"),
        (7.4, C, LOCAL, r"$U = A\,(\beta\circ X)$", "the corrections"),
        (10.8, C, RESULT, r"$O = Q_{\mathrm{in}}\,S + P\,U$", "outputs"),
        (14.75, K, STATE, r"$S' = \mathrm{total}\circ S + K_{\mathrm{out}}^{\top}\,U$", "state leaving"),
    ]
    for x, height, color, equation, meaning in products:
        matrix(ax, x, lane, height, V, color)
        label(ax, x, 2.22, equation, 13.5)
        label(ax, x, 1.83, meaning, 11, QUIET)

    path(ax, [(9.0, lane), (9.0, 3.97), (12.7, 3.97), (12.7, lane), (14.75 - gap, lane)], LOCAL, level=1.2)
    ax.plot([10.8, 10.8], [3.85, 4.09], color=SERIAL_BAND, lw=9, zorder=1.3, solid_capstyle="butt")  # a bridge
    for left, right, x in [(3.55, 5.0, 4.3), (6.65, 8.1, 7.4), (10.05, 11.55, 10.8), (14.0, 15.5, 14.75)]:
        for source in (left, right):
            path(ax, [(source, 5.08), (source, 4.25), (x, 4.25)], LOCAL, head=False, width=1.5)
        path(ax, [(x, 4.25), (x, lane + (K if x == 14.75 else C) / 2 + 0.06)], LOCAL, width=1.5)
    path(ax, [(4.3 + gap, lane), (7.4 - gap, lane)], LOCAL)
    path(ax, [(7.4 + gap, lane), (10.8 - gap, lane)], LOCAL)

    path(ax, [(0.3, lane), (1.45 - gap, lane)], STATE, width=2.4)
    path(ax, [(1.45, 1.58), (1.45, rail), (14.75, rail), (14.75, 1.58)], STATE, width=2.4)
    for x in (4.3, 10.8):
        path(ax, [(x, rail), (x, 1.58)], STATE, width=2.4)
    path(ax, [(14.75 + gap, lane), (16.7, lane)], STATE, width=2.4)


Panel = tuple[str, Callable[[Axes], None], float]
"""Title, what draws it, and its share of the height."""


def draw_panels(description: str | None, default: str, height: float, panels: list[Panel]) -> None:
    """The command line of a drawing: panels one above the other, written to `--out`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(default), help=".svg, .png or .pdf")
    out = parser.parse_args().out
    plt.rcParams.update({"font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans", "svg.hashsalt": "deltazoo"})
    shares = [share for _, _, share in panels]
    figure, axes = plt.subplots(len(panels), 1, figsize=(15, height), height_ratios=shares, facecolor=PAPER)
    for ax, (title, draw, _) in zip(axes, panels, strict=True):
        ax.axis("off")
        draw(ax)
        ax.set_title(title, loc="left", fontsize=15, color=INK, fontweight="bold", pad=8)
    figure.tight_layout(h_pad=1.5)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, metadata={"Date": None} if out.suffix == ".svg" else None)
    print(f"drew {out}")


def main() -> None:
    panels: list[Panel] = [
        ("A sequence: preparation is parallel, the state is handed on", draw_sequence, 3.05),
        ("One chunk of C tokens", draw_chunk, 9.05),
    ]
    draw_panels(__doc__, "docs/images/chunk_dataflow.svg", 10.8, panels)


if __name__ == "__main__":
    main()
