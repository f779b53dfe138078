"""What tests of captured training steps share: graphs stood in for on a CPU, and what a model has counted."""

from __future__ import annotations

import pytest
from torch import nn

import deltazoo
from deltazoo.generation import batch
from deltazoo.models import modeling
from deltazoo.models.captured_training import kept, library_blocks


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if CUDA graphs ran on the CPU: a replay runs the blocks and writes where the last replay wrote."""
    for module in (batch, kept, modeling, library_blocks):
        monkeypatch.setattr(module, "graphs_run_on", lambda device: True)


def replayed(model: nn.Module) -> int:
    return next(vars(m)["_captured_training"] for m in model.modules() if "_captured_training" in vars(m)).replayed


def reasons(model: nn.Module) -> str:
    return str(deltazoo.report(model).captured)
