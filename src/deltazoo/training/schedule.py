"""Learning rate schedules: linear warm-up, then a cosine, a line or a constant."""

import math

from deltazoo.training.config import OptimizationConfig


def learning_rate_factor(step: int, settings: OptimizationConfig) -> float:
    """Learning rate of optimizer step ``step`` (from 0) relative to the peak.

    It rises linearly and reaches the peak at the last warm-up step. It then falls along the chosen shape and reaches
    ``min_learning_rate_ratio`` at the last step of the run.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = min(1.0, (step + 1 - settings.warmup_steps) / (settings.steps - settings.warmup_steps))
    fall = (1 - math.cos(math.pi * done)) / 2 if settings.schedule == "cosine" else done
    return 1.0 - (1.0 - settings.min_learning_rate_ratio) * fall
