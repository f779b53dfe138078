"""Draws docs/images/kernel_pipeline.svg: the kernels of the Triton backend, and what passes between them.

    python scripts/draw_kernel_pipeline.py [--out docs/images/kernel_pipeline.svg]

Above, boxes with round corners are kernels and the others tensors in GPU memory; below, one step of the scan to scale.
"""

from __future__ import annotations

from draw_chunk_dataflow import (
    INK,
    INPUT,
    LOCAL,
    PAPER,
    PARALLEL_BAND,
    QUIET,
    RESULT,
    SERIAL_BAND,
    STATE,
    Panel,
    band,
    draw_panels,
    label,
    matrix,
    path,
    tint,
)
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

# Drawn sizes: the value channels of one program, all key channels of a head, the tokens of a chunk.
V, K, C = 0.75, 1.25, 0.75

NEXT_STATE = r"$S'^\top-\;$total$\,\circ\,S^\top$"


def kernel(ax: Axes, x: float, y: float, name: str, caption: str, serial: bool) -> None:
    band(ax, x - 1.35, y - 0.5, 2.7, 1.0, SERIAL_BAND if serial else PARALLEL_BAND, edge=STATE if serial else LOCAL)
    label(ax, x, y + 0.16, name, 14)
    label(ax, x, y - 0.24, caption, 10.5, QUIET)


def tensors(ax: Axes, x: float, y: float, names: str, caption: str, color: str) -> None:
    box = dict(facecolor=tint(color), edgecolor=color, linewidth=1.6, joinstyle="round")
    ax.add_patch(Rectangle((x - 1.05, y - 0.42), 2.1, 0.84, **box))
    label(ax, x, y + (0.14 if caption else 0), names, 13.5)
    label(ax, x, y - 0.23, caption, 10.5, QUIET)


def draw_pipeline(ax: Axes) -> None:
    """Forward on top, backward below; what the forward pass keeps goes down in the middle."""
    ax.set(xlim=(0, 17), ylim=(0.2, 6.9))
    forward, upper, lower = 5.9, 3.1, 1.0
    tensors(ax, 1.3, forward, r"$q\;\;k\;\;v\;\;\beta\;\;g$", "inputs", INPUT)
    kernel(ax, 4.7, forward, "prepare", "every chunk at once", serial=False)
    tensors(ax, 8.1, forward, r"$A\;\;P\;\;\beta\;\;G$", "per chunk", LOCAL)
    kernel(ax, 11.6, forward, "scan", "chunk after chunk", serial=True)
    tensors(ax, 15.3, forward, r"$O$,  last $S$", "results", RESULT)
    path(ax, [(2.35, forward), (3.35, forward)], INPUT)
    path(ax, [(6.05, forward), (7.05, forward)], LOCAL)
    path(ax, [(9.15, forward), (10.25, forward)], LOCAL)
    path(ax, [(12.95, forward), (14.25, forward)], RESULT)
    path(ax, [(1.3, 5.48), (1.3, 4.85), (11.6, 4.85), (11.6, 5.4)], INPUT, level=1.2)
    label(ax, 4.7, 5.06, r"$q,\,k,\,v$", 11.5, QUIET)

    tensors(ax, 1.3, lower, r"$dO$", "gradient coming in", INPUT)
    kernel(ax, 4.7, upper, "scan again", "storing every state", serial=True)
    kernel(ax, 4.7, lower, "reverse scan", "from last chunk to first", serial=True)
    tensors(ax, 8.1, upper, r"$U$,  every $S$", "per chunk", STATE)
    tensors(ax, 8.1, lower, r"$Z$,  every $dS$", "per chunk", STATE)
    kernel(ax, 11.6, (upper + lower) / 2, "chunk gradients", "every chunk at once", serial=False)
    tensors(ax, 15.3, (upper + lower) / 2, r"$dq\;dk\;dv\;d\beta\;dg$", "results", RESULT)
    ax.plot([8.1, 8.1], [4.72, 4.98], color=PAPER, lw=9, zorder=1.3, solid_capstyle="butt")  # a bridge
    path(ax, [(8.1, 5.48), (8.1, 4.3), (4.7, 4.3), (4.7, upper + 0.5)], LOCAL)
    path(ax, [(4.7, 4.3), (2.75, 4.3), (2.75, 1.35), (3.35, 1.35)], LOCAL)
    label(ax, 6.4, 4.5, "kept", 11.5, QUIET)
    path(ax, [(2.35, lower), (3.35, lower)], INPUT)
    for y in (upper, lower):
        path(ax, [(6.05, y), (7.05, y)], STATE)
        path(ax, [(9.15, y), (9.65, y), (9.65, 2.05)], STATE, head=False)
    path(ax, [(9.65, 2.05), (10.25, 2.05)], STATE)
    path(ax, [(12.95, 2.05), (14.25, 2.05)], RESULT)


def product(ax: Axes, x: float, width: float, left: tuple[str, str], depth: float, right: str) -> None:
    """Left operand [V, width] from registers, times the right one [width, depth] from shared memory."""
    name, color = left
    matrix(ax, x, 2.3, V, width, color)
    label(ax, x, 2.3, name, 12)
    label(ax, x + width / 2 + 0.16, 2.3, "·", 18)
    matrix(ax, x + width / 2 + 0.32 + depth / 2, 2.3, width, depth, INPUT)
    label(ax, x + width / 2 + 0.32 + depth / 2, 2.3, right, 12)


def draw_step(ax: Axes) -> None:
    """The chain of products that a chunk has to wait for; the output hangs off it."""
    ax.set(xlim=(0, 17), ylim=(0.35, 3.5))
    steps = [
        (1.2, K, (r"$S^\top$", STATE), C, r"$k_{\mathrm{in}}^\top$", r"$Y^\top$", "what the state recalls"),
        (4.7, C, (r"$X^\top$", LOCAL), C, r"$A^\top$", r"$U^\top$", r"corrections,  $X=\beta\circ(v-Y)$"),
        (8.05, C, (r"$U^\top$", LOCAL), K, r"$k_{\mathrm{out}}$", NEXT_STATE, "the state leaving"),
        (11.85, K, (r"$S^\top$", STATE), C, r"$q^\top$", "", ""),
        (14.4, C, (r"$U^\top$", LOCAL), C, r"$P^\top$", "", ""),
    ]
    for x, width, left, depth, right, result, meaning in steps:
        product(ax, x, width, left, depth, right)
        if not meaning:
            continue
        middle = x + 0.16 + depth / 2
        label(ax, middle, 1.25, f"$=$ {result}", 13)
        label(ax, middle, 0.82, meaning, 11, QUIET)
        if result != NEXT_STATE:
            path(ax, [(x + width / 2 + depth + 0.5, 2.3), (x + width / 2 + depth + 0.95, 2.3)], INK)
    label(ax, 13.82, 2.3, "+", 16)
    label(ax, 13.85, 1.25, r"$=\;O^\top$", 13)
    label(ax, 13.85, 0.82, "outputs; the next chunk needs none of them", 11, QUIET)


def main() -> None:
    panels: list[Panel] = [
        ("Kernels (blue: all chunks in parallel; orange: one chunk after another)", draw_pipeline, 6.7),
        ("One step of the scan: the left operand (coloured) stays in registers", draw_step, 3.15),
    ]
    draw_panels(__doc__, "docs/images/kernel_pipeline.svg", 9.2, panels)


if __name__ == "__main__":
    main()
