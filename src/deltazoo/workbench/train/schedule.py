"""The learning rate over the steps."""

import math

from deltazoo.workbench.train.config import OptimizationConfig


def learning_rate_factor(step: int, settings: OptimizationConfig) -> float:
    """Learning rate of optimizer step ``step`` (from 0) relative to the peak.

    Rises linearly over the warm-up, reaching the peak with its last step, then falls to ``min_learning_rate_ratio``
    along the chosen shape, reaching it with the last step of the run.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = min(1.0, (step + 1 - settings.warmup_steps) / (settings.steps - settings.warmup_steps))
    fall = (1 - math.cos(math.pi * done)) / 2 if settings.schedule == "cosine" else done
    return 1.0 - (1.0 - settings.min_learning_rate_ratio) * fall
