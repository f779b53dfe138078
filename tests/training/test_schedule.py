"""The learning rate follows its shape."""

from __future__ import annotations

import pytest

from deltazoo.training.config import OptimizationConfig
from deltazoo.training.schedule import learning_rate_factor


def settings(**changes: object) -> OptimizationConfig:
    values = {"steps": 100, "row_length": 8, "rows_per_batch": 1, "learning_rate": 1.0, "warmup": 0.1}
    return OptimizationConfig(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_learning_rate_rises_to_the_peak_and_falls_to_its_end(schedule: str) -> None:
    chosen = settings(schedule=schedule, min_learning_rate_ratio=0.1)
    factors = [learning_rate_factor(step, chosen) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[-1] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in zip(factors[9:], factors[10:], strict=False))
    middle = factors[54]
    assert middle == pytest.approx(0.55), "half way down after half of the steps, along either shape"


def test_a_constant_rate_stays_at_the_peak() -> None:
    chosen = settings(schedule="constant", warmup=0.0)
    assert {learning_rate_factor(step, chosen) for step in range(100)} == {1.0}
