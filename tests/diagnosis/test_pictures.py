"""The loss curve: both losses, labelled axes, a PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from deltazoo.diagnosis.pictures import curves, draw_loss_curve

HISTORY = [
    {"step": 10, "loss": 5.0, "learning_rate": 0.1},
    {"step": 20, "loss": 4.0},
    {"step": 20, "eval_loss": 4.2, "eval_bits_per_byte": 2.0},
    {"step": 30, "loss": 3.5},
]


def test_the_history_is_split_into_both_losses() -> None:
    assert curves(HISTORY) == {"training": [(10, 5.0), (20, 4.0), (30, 3.5)], "validation": [(20, 4.2)]}


def test_the_picture_shows_both_losses_with_labelled_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    path = draw_loss_curve(HISTORY, tmp_path / "loss.png", "a title", tokens_per_step=1000)
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    assert [line.get_label() for line in axes.get_lines()] == ["training", "validation"]
    assert list(axes.get_lines()[0].get_ydata()) == [5.0, 4.0, 3.5]
    assert axes.get_xlabel() == "optimizer step"
    assert axes.get_ylabel() == "loss (nats per token)"
    assert axes.get_title() == "a title"
    (tokens,) = axes.child_axes
    assert tokens.get_xlabel() == "training tokens (millions)"
    assert tokens.get_xlim() == pytest.approx([limit / 1000 for limit in axes.get_xlim()])
