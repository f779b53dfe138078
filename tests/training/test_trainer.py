"""The learning rate follows its shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import run_config
from transformers import get_scheduler

from deltazoo.training.trainer import training_arguments


def factors(folder: Path, **changes: object) -> list[float]:
    """Of 100 steps, ten of them warm-up, relative to the peak; the scheduler as Trainer makes it."""
    settings = {"steps": 100, "learning_rate": 1.0, "warmup": 0.1, **changes}
    arguments = training_arguments(run_config(folder, folder, training=settings))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    schedule = get_scheduler(
        arguments.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=arguments.get_warmup_steps(100),
        num_training_steps=100,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )
    found = []
    for _ in range(100):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_learning_rate_rises_to_the_peak_and_falls_to_its_end(schedule: str, tmp_path: Path) -> None:
    found = factors(tmp_path, schedule=schedule, min_learning_rate_ratio=0.1)
    assert max(found) == pytest.approx(1.0) and found.index(max(found)) in (9, 10)
    assert all(later > earlier for earlier, later in zip(found[:9], found[1:10], strict=True))
    assert all(later < earlier for earlier, later in zip(found[10:], found[11:], strict=False))
    assert found[-1] == pytest.approx(0.1, abs=0.011)
    assert found[54] == pytest.approx(0.55, abs=0.016), "half way down after half of the steps, along either shape"


def test_a_constant_rate_stays_at_the_peak(tmp_path: Path) -> None:
    assert set(factors(tmp_path, schedule="constant", warmup=0.0)) == {1.0}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_warm_up_may_last_for_the_whole_run(schedule: str, tmp_path: Path) -> None:
    assert factors(tmp_path, schedule=schedule, warmup=1.0)[-1] == pytest.approx(1.0, abs=0.011)
