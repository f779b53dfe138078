"""Training of one configuration: AdamW on rows of the corpus in bfloat16 autocast, with speed and memory."""

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from deltazoo.layers import parameter_groups
from experiments.text.rows import TrainingRows
from experiments.text.text_configurations import build_model
from experiments.text.text_corpus import TextCorpus
from experiments.text.text_recipe import TextRecipe

__all__ = ["Training", "autocast"]

_CURVE_POINTS = 96
_PACED = 8
"""Steps between two readings of the clock, which wait for the device."""


class Training:
    """The training of one configuration, which can stop after any step and go on.

    Args:
        configuration, recipe, corpus: what is trained.
        rate: peak learning rate.
        seed: of the initial weights and of the order of the rows.
        device: where.

    Attributes:
        rate: peak learning rate.
        model: as trained so far.
        seconds: of the steps so far.
        peak_bytes: most memory held on a GPU during the last `advance`, weights and optimizer included; None on a CPU.
    """

    def __init__(
        self,
        configuration: str,
        recipe: TextRecipe,
        corpus: TextCorpus,
        *,
        rate: float,
        seed: int,
        device: torch.device | str,
    ) -> None:
        self.rate = rate
        self._recipe, self._device = recipe, torch.device(device)
        with self._device:
            self.model = build_model(configuration, recipe, corpus.vocab_size, seed=seed)
        groups = parameter_groups(self.model, recipe.weight_decay)
        self._optimizer = torch.optim.AdamW(groups, lr=rate, betas=recipe.betas, fused=True)
        rows = TrainingRows(corpus.train, recipe.row_length, recipe.rows_per_step, seed, self._device)
        self._batches = rows.batches(recipe.steps)
        self._losses: list[Tensor] = []
        self._paces: list[float] = []
        self.seconds = 0.0
        self.peak_bytes: int | None = None

    @property
    def steps(self) -> int:
        """Done so far."""
        return len(self._losses)

    @property
    def losses(self) -> list[float]:
        """Of every step's batch before its update, in nats per token; the last one may be not finite."""
        return torch.stack(self._losses).tolist() if self._losses else []

    @property
    def is_finite(self) -> bool:
        """Whether the loss was finite so far; a training ends where it is not."""
        return not self._losses or math.isfinite(self._losses[-1].item())

    @property
    def tokens_per_second(self) -> float:
        """Median over groups of steps, the first left out, where kernels are compiled."""
        return self._recipe.tokens_per_step / self._seconds_per_step

    def advance(self, steps: int, watch: Callable[[float], None] = lambda seconds_left: None) -> None:
        """Train until so many steps are done, or the loss is not finite.

        Args:
            steps: from the training's beginning.
            watch: called now and then with the seconds that the rest of them will take at the present pace; with 0
                after the steps in which kernels are compiled.
        """
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        self.model.train()
        before = time.perf_counter()
        while self.steps < steps and self.is_finite:
            group = min(_PACED, steps - self.steps)
            for _ in range(group):
                self._losses.append(self._step())
            self._losses[-1].item()  # waits for the device
            spent = time.perf_counter() - before
            before += spent
            self.seconds += spent
            self._paces.append(spent / group)
            if self.is_finite:
                watch(self._seconds_per_step * (steps - self.steps) if len(self._paces) > 1 else 0.0)
        if on_gpu:
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)

    def judged(self, steps: int) -> float:
        """Mean loss of the last `steps` steps; infinity where it is not finite."""
        last = self.losses[-steps:]
        return sum(last) / len(last) if self.is_finite else math.inf

    def curve(self) -> list[tuple[int, float]]:
        """(steps, mean loss since the point before), thinned."""
        losses = self.losses
        every = max(1, len(losses) // _CURVE_POINTS)
        groups = [losses[first : first + every] for first in range(0, len(losses), every)]
        ends = [min(first + every, len(losses)) for first in range(0, len(losses), every)]
        return [(end, round(sum(group) / len(group), 4)) for end, group in zip(ends, groups, strict=True)]

    @property
    def _seconds_per_step(self) -> float:
        return statistics.median(self._paces[1:] or self._paces)

    def _step(self) -> Tensor:
        recipe = self._recipe
        tokens, successors = next(self._batches)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate * recipe.rate_factor(self.steps, recipe.steps)
        with autocast(self._device):
            # The model returns the mean over all tokens, each of which predicts its successor.
            loss = self.model(input_ids=tokens, labels=tokens, shift_labels=successors, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def autocast(device: torch.device | str) -> torch.autocast:
    """The precision of training and scoring: bfloat16 products on a GPU, float32 elsewhere."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")
