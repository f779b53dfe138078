"""The picture of a training run: training and validation loss over the tokens read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Okabe and Ito's blue and vermilion: told apart with any common colour blindness, and in grey by their brightness.
_TRAINING, _VALIDATION = "#0072B2", "#D55E00"


def curves(log_history: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """``(step, loss in nats per token)`` pairs of both losses from the Trainer's log history."""
    return {
        name: [(int(entry["step"]), float(entry[key])) for entry in log_history if key in entry]
        for name, key in (("training", "loss"), ("validation", "eval_loss"))
    }


def draw_loss_curve(log_history: Sequence[dict[str, Any]], path: str | Path, title: str, tokens_per_step: int) -> Path:
    """Write the picture as PNG.

    Args:
        log_history: the Trainer's log history.
        path: where the PNG goes.
        title: put above the picture.
        tokens_per_step: tokens per optimizer step, for the upper axis.

    Raises:
        ValueError: the history holds no training loss.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = curves(log_history)
    if not found["training"]:
        raise ValueError("the log history holds no training loss to draw")
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*zip(*found["training"], strict=True), color=_TRAINING, linewidth=1.5, label="training")
    if found["validation"]:
        axes.plot(*zip(*found["validation"], strict=True), "o--", color=_VALIDATION, markersize=4, label="validation")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    millions = tokens_per_step / 1e6
    scale = (lambda x: np.multiply(x, millions)), (lambda x: np.divide(x, millions))
    tokens = axes.secondary_xaxis("top", functions=scale)
    tokens.set_xlabel("training tokens (millions)")
    path = Path(path)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
