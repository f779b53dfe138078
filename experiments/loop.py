"""The training loop of all suites: batches, loss, gradients, AdamW, one learning rate per step."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.layers import parameter_groups

_PACED = 8
"""Steps between two readings of the clock and of the loss, which wait for the device."""


def rate_factor(
    step: int, steps: int, warmup: int, *, final: float = 0.0, shape: str = "cosine", first: int = 1
) -> float:
    """Learning rate over its peak at `step` (from 0) of `steps`: a line up, then a cosine or a line down to `final`.

    With `first` 1 the first step after the warm-up is below the peak and the last one at `final`; with 0 the first one
    is at the peak and the last one above `final`.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step + first - warmup) / max(1, steps - warmup))
    left = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
    return final + (1 - final) * left


def autocast(device: torch.device | str) -> torch.autocast:
    """The precision of the text suites: bfloat16 products on a GPU, float32 elsewhere."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


class Loop:
    """The training of a model, which can stop after any step and go on.

    Args:
        model: what is trained, all parameters that require gradients.
        batches: one per step.
        figures_of: of the model and a batch: the loss, and further scalars that are only recorded.
        rate: peak learning rate.
        factor: of a step from 0: the learning rate over its peak.
        weight_decay, betas, clip: of AdamW, and the largest norm of the gradients.

    Attributes:
        steps: done so far.
        seconds: of the steps so far, not of what happens between two calls of `advance`.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterator[Any],
        figures_of: Callable[[Any, Any], tuple[Tensor, ...]],
        *,
        rate: float,
        factor: Callable[[int], float],
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.95),
        clip: float = 1.0,
    ) -> None:
        self.model, self._batches, self._figures_of = model, batches, figures_of
        self._rate, self._factor, self._clip = rate, factor, clip
        groups = parameter_groups(model, weight_decay)
        self._optimizer = torch.optim.AdamW(groups, lr=rate, betas=tuple(betas), fused=True)
        self._figures: list[Tensor] = []
        self._paces: list[float] = []
        self.steps = 0
        self.seconds = 0.0

    def advance(self, steps: int, tick: Callable[[], None] = lambda: None) -> bool:
        """Train until so many steps are done; whether the loss was finite all the time, else the training ends there.

        Args:
            steps: from the training's beginning.
            tick: called after every few steps.
        """
        self.model.train()
        before = time.perf_counter()
        while self.steps < steps and self.is_finite:
            group = min(_PACED, steps - self.steps)
            for _ in range(group):
                self._step()
            finite = self.is_finite  # waits for the device
            spent = time.perf_counter() - before
            before += spent
            self.seconds += spent
            self._paces.append(spent / group)
            if finite:
                tick()
        return self.is_finite

    def _step(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * self._factor(self.steps)
        figures = self._figures_of(self.model, next(self._batches))
        figures[0].backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._figures.append(torch.stack([figure.detach() for figure in figures]))
        self.steps += 1

    @property
    def is_finite(self) -> bool:
        """Whether the last loss is a number."""
        return not self._figures or math.isfinite(self._figures[-1][0].item())

    @property
    def losses(self) -> list[float]:
        """Of every step's batch before its update."""
        return [figures[0].item() for figures in self._figures]

    @property
    def seconds_per_step(self) -> float:
        """Median over groups of steps, the first left out, where kernels are compiled."""
        return statistics.median(self._paces[1:] or self._paces)

    def curve(self, points: int = 100) -> list[list[float]]:
        """Step and mean figures since the point before, thinned."""
        every = max(1, self.steps // points)
        groups = [self._figures[first : first + every] for first in range(0, self.steps, every)]
        ends = [min(first + every, self.steps) for first in range(0, self.steps, every)]
        means = [torch.stack(group).mean(0).tolist() for group in groups]
        return [[end, *(round(mean, 5) for mean in found)] for end, found in zip(ends, means, strict=True)]
