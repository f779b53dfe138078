"""Draw the training and validation loss of a run over its steps and tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deltazoo.training.figures import BLUE, ORANGE, new_figure, save_figure


def curves(log_history: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """``(step, loss in nats per token)`` pairs of both losses from the Trainer's log history."""
    return {
        name: [(int(entry["step"]), float(entry[key])) for entry in log_history if key in entry]
        for name, key in (("training", "loss"), ("validation", "eval_loss"))
    }


def draw_loss_curve(log_history: Sequence[dict[str, Any]], path: str | Path, title: str, tokens_per_step: int) -> Path:
    """Draw both losses of a run as a PNG.

    Args:
        log_history: the Trainer's log history.
        path: where the PNG goes.
        title: above the picture.
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
