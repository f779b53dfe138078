"""Training of one configuration: AdamW on rows of the corpus in bfloat16 autocast, with speed and memory."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deltazoo.layers import parameter_groups
from deltazoo.models import DeltaRuleForCausalLM
from deltazoo.workbench.lab.text.rows import TrainingRows
from deltazoo.workbench.lab.text.text_configurations import build_model
from deltazoo.workbench.lab.text.text_corpus import TextCorpus
from deltazoo.workbench.lab.text.text_recipe import TextRecipe

__all__ = ["Trained", "autocast", "train"]

_CURVE_POINTS = 96
_PACED = 8
"""Steps between two readings of the clock, which wait for the device."""


@dataclass(frozen=True)
class Trained:
    """A trained model and how the training went."""

    model: DeltaRuleForCausalLM
    losses: list[float]
    """Of every step's batch before its update, in nats per token; the training ends where it is not finite."""
    seconds: float
    tokens_per_second: float
    """Median over groups of steps, the first left out, where kernels are compiled."""
    peak_bytes: int | None
    """Most memory held on a GPU, weights and optimizer included; None on a CPU."""

    @property
    def is_finite(self) -> bool:
        """Whether the loss was finite to the end."""
        return math.isfinite(self.losses[-1])

    def judged(self, share: float) -> float:
        """Mean loss of the last share of the steps; infinity where it is not finite."""
        if not self.is_finite:
            return math.inf
        last = self.losses[-max(1, round(share * len(self.losses))) :]
        return sum(last) / len(last)

    def curve(self) -> list[tuple[int, float]]:
        """(steps, mean loss since the point before), thinned."""
        every = max(1, len(self.losses) // _CURVE_POINTS)
        groups = [self.losses[first : first + every] for first in range(0, len(self.losses), every)]
        ends = [min(first + every, len(self.losses)) for first in range(0, len(self.losses), every)]
        return [(end, round(sum(group) / len(group), 4)) for end, group in zip(ends, groups, strict=True)]


def train(
    configuration: str,
    recipe: TextRecipe,
    corpus: TextCorpus,
    *,
    rate: float,
    steps: int,
    seed: int,
    device: torch.device | str,
    watch: Callable[[float], None] = lambda seconds_left: None,
) -> Trained:
    """Train a configuration for `steps` with a peak learning rate.

    Args:
        configuration, recipe, corpus: what is trained.
        rate, steps: of this training; trials are shorter.
        seed: of the initial weights and of the order of the rows.
        device: where.
        watch: called now and then with the seconds that the rest will take at the present pace; first with 0, after the
            steps in which kernels are compiled.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    with torch.device(device):
        model = build_model(configuration, recipe, corpus.vocab_size, seed=seed).train()
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe.weight_decay), lr=rate, betas=recipe.betas, fused=True)
    rows = TrainingRows(corpus.train, recipe.row_length, recipe.rows_per_step, seed, device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    losses: list[Tensor] = []
    paces: list[float] = []
    began = before = time.perf_counter()
    for step, (tokens, successors) in enumerate(rows.batches(steps)):
        for group in optimizer.param_groups:
            group["lr"] = rate * recipe.rate_factor(step, steps)
        with autocast(device):
            # The model returns the mean over all tokens, each of which predicts its successor.
            loss = model(input_ids=tokens, labels=tokens, shift_labels=successors, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (step + 1) % _PACED == 0 or step + 1 == steps:
            is_finite = math.isfinite(losses[-1].item())  # waits for the device
            now = time.perf_counter()
            paces.append((now - before) / ((step % _PACED) + 1))
            before = now
            if not is_finite:
                break
            watch(_usual(paces) * (steps - step - 1) if len(paces) > 1 else 0.0)
    seconds = time.perf_counter() - began
    return Trained(
        model=model,
        losses=torch.stack(losses).tolist(),
        seconds=seconds,
        tokens_per_second=recipe.tokens_per_step / _usual(paces),
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
    )


def autocast(device: torch.device | str) -> torch.autocast:
    """The precision of training and scoring: bfloat16 products on a GPU, float32 elsewhere."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


def _usual(paces: list[float]) -> float:
    """Seconds per step without the first group, in which kernels are compiled."""
    return statistics.median(paces[1:] or paces)
