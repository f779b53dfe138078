"""What tests of captured training steps share: graphs stood in for on a CPU, and what a model has counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def train(
    model: Any, data: list[dict[str, Tensor]], accumulate: int = 1, autocast: str | None = None
) -> list[list[Tensor]]:
    """Loss and gradients of each step, the very tensors that the loop saw; under autocast on that kind of device."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    seen = []
    torch.manual_seed(7)
    for number, inputs in enumerate(data, 1):
        with torch.autocast(autocast or "cpu", torch.bfloat16, enabled=autocast is not None):
            loss = model(**inputs, use_cache=False).loss
        (loss / accumulate).backward()
        if number % accumulate == 0:
            seen.append([loss, *[p.grad for p in model.parameters() if p.grad is not None]])
            optimizer.step()
            optimizer.zero_grad()
    return seen


def assert_same(eager: Sequence[Sequence[Tensor]], captured: Sequence[Sequence[Tensor]]) -> None:
    """Compared after the last step: what the loop kept of earlier ones must not have changed."""
    assert len(eager) == len(captured)
    for step, (expected, found) in enumerate(zip(eager, captured, strict=True)):
        assert len(expected) == len(found)
        differing = [i for i, (x, y) in enumerate(zip(expected, found, strict=True)) if not torch.equal(x, y)]
        assert not differing, f"step {step}: {differing}"


def reasons(model: nn.Module) -> str:
    return str(deltazoo.report(model).captured)
