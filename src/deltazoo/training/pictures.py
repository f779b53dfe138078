"""Pictures of training: the losses of a run, and those of a distillation. matplotlib is an extra."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deltazoo.diagnosis.pictures import BLACK, BLUE, GREY, ORANGE, new_figure, save_figure

_PANEL = 4.6  # inches
_LOSSES = {
    "align": "relative squared error of a layer",
    "distill": "KL to the original and\nweighted text loss, nats",
    "finetune": "loss on text, nats per token",
}


def curves(log_history: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Pairs ``(step, loss in nats per token)`` of both losses in the Trainer's log history."""
    return {
        name: [(int(entry["step"]), float(entry[key])) for entry in log_history if key in entry]
        for name, key in (("training", "loss"), ("validation", "eval_loss"))
    }


def draw_loss_curve(log_history: Sequence[dict[str, Any]], path: str | Path, title: str, tokens_per_step: int) -> Path:
    """Path of a PNG with both losses of a run, which is drawn.

    Args:
        log_history: the Trainer's log history.
        path: path of the PNG.
        title: title of the picture.
        tokens_per_step: tokens per optimizer step, for the upper axis.

    Raises:
        ValueError: the history holds no training loss.
    """
    found = curves(log_history)
    if not found["training"]:
        raise ValueError("the log history holds no training loss to draw")
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
        path: path of the PNG.
        histories: the Trainer's log history by stage, in the order of the stages.
        scores: bits per byte of all held-out rows, for ``original``, ``transfer`` and each stage. The Trainer's
            history has those of some rows, which may differ slightly.
        title: title of the picture.
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
