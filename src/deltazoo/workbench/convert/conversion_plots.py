"""Pictures of a conversion: the losses of all stages in one, and the ranking of the layers."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltazoo.workbench.convert.layer_ranking import Ranking

__all__ = ["draw_conversion", "draw_ranking"]

# Okabe and Ito's palette: told apart with any common colour blindness, and in grey by brightness and dashes.
_TRAINING, _HELD_OUT, _ORIGINAL, _TRANSFER = "#0072B2", "#D55E00", "#000000", "#8C8C8C"
_PANEL = 4.6  # inches
_LOSSES = {
    "align": "relative squared error of a layer",
    "distill": "KL to the original and\nweighted text loss, nats",
    "finetune": "loss on text, nats per token",
}


def draw_conversion(
    path: Path, histories: Mapping[str, Sequence[Mapping[str, Any]]], scores: Mapping[str, float], title: str
) -> Path:
    """One panel per stage: its own loss on the left axis, held-out bits per byte of the whole model on the right.

    Args:
        path: where the PNG goes.
        histories: stage -> the Trainer's log history, in the order of the stages.
        scores: bits per byte of all held-out rows: of ``original``, ``transfer`` and each stage. What the Trainer's
            history holds is that of some rows, and may lie a little off.
        title: put above the picture.
    """
    plt = _pyplot()
    count = len(histories)
    columns = min(5, 2 * count - 1)  # of the legend, which is as wide as three panels in one line
    figure, axes = plt.subplots(
        1, count, figsize=(_PANEL * count, 3.9 + 0.3 * math.ceil(5 / columns)), layout="constrained"
    )
    panels = [axes] if count == 1 else list(axes)
    rights = [axis.twinx() for axis in panels]
    for axis, right, (stage, history) in zip(panels, rights, histories.items(), strict=True):
        losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
        bits = [(entry["step"], entry["eval_bits_per_byte"]) for entry in history if "eval_bits_per_byte" in entry]
        axis.plot(*zip(*losses, strict=True), color=_TRAINING, linewidth=1.5, label="the stage's loss (left)")
        right.plot(*zip(*bits, strict=True), "o--", color=_HELD_OUT, markersize=4, label="held-out, some rows (right)")
        right.plot(
            losses[-1][0], scores[stage], "*", color=_HELD_OUT, markersize=13, label="held-out, all rows (right)"
        )
        right.axhline(scores["original"], color=_ORIGINAL, linestyle=":", label="original, all rows (right)")
        right.axhline(scores["transfer"], color=_TRANSFER, linestyle="-.", label="after transfer, all rows (right)")
        axis.set(xlabel="optimizer step", title=stage)
        axis.set_ylabel(_LOSSES[stage], color=_TRAINING)
        right.set_ylabel("held-out bits per byte", color=_HELD_OUT)
        axis.grid(alpha=0.3)
    low = min(axis.get_ylim()[0] for axis in rights)
    high = max(axis.get_ylim()[1] for axis in rights)
    for right in rights:
        right.set_ylim(low, high)
    lines = [*panels[0].get_lines(), *rights[0].get_lines()]
    figure.legend(lines, [line.get_label() for line in lines], loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(textwrap.fill(title, 44 * count))
    return _save(figure, path)


def draw_ranking(path: Path, ranking: Ranking, chosen: Sequence[int] = ()) -> Path:
    """The rise in loss of each layer as bars, those that were chosen filled.

    Args:
        path: where the PNG goes.
        ranking: what was measured.
        chosen: layers to mark; all look alike if none is.
    """
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(max(5.0, 0.45 * len(ranking.layers) + 2), 3.8), layout="constrained")
    for score in ranking.layers:
        filled = not chosen or score.layer in chosen
        axis.bar(score.layer, score.rise, color=_TRAINING if filled else "white", edgecolor=_TRAINING)
    axis.axhline(0, color=_ORIGINAL, linewidth=0.8)
    axis.set_xticks([score.layer for score in ranking.layers])
    axis.set(xlabel="layer swapped alone, after transfer", ylabel="rise in loss, nats per token")
    note = "\nfilled: chosen" if chosen else ""
    axis.set_title(f"{ranking.variant}; original: {ranking.loss:.3f} nats per token{note}", fontsize=10)
    axis.grid(axis="y", alpha=0.3)
    return _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    _pyplot().close(figure)
    return path
