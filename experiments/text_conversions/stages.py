"""A conversion in memory: attention swapped, then trained through the stages on rows of the suite's text."""

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaForCausalLM

from deltazoo.layers import parameter_groups
from deltazoo.swap import swap_attention, swapped_layers
from deltazoo.training.conversion_config import DistillationConfig, StageConfig
from deltazoo.training.schedule import learning_rate_factor
from deltazoo.training.stage_trainers import (
    choose_trained_parameters,
    divergence,
    next_token_loss,
    teacher_forced,
)
from experiments.text.rows import TrainingRows
from experiments.text.text_corpus import TextCorpus
from experiments.text.training import autocast
from experiments.text_conversions.conversion_recipe import (
    CONTROL,
    Conversion,
    ConversionRecipe,
    tokens_of,
    tokens_of_step,
)

__all__ = ["Converted", "convert_copy"]

_PACED = 8
"""Steps between two readings of the clock, which wait for the device."""


@dataclass(frozen=True)
class Converted:
    """A converted model and how the conversion went."""

    model: LlamaForCausalLM
    swapped: list[int]
    """Numbers of the layers with delta rule."""
    points: list[tuple[str, int, float]]
    """(stage, tokens read since the swap, score), first that after the swap: ("transfer", 0, score)."""
    stage_seconds: dict[str, float]
    """Of training, without scoring."""
    peak_bytes: int | None
    """Most memory held on a GPU in training, the original model included; None on a CPU."""


def convert_copy(
    original: LlamaForCausalLM,
    conversion: Conversion,
    recipe: ConversionRecipe,
    corpus: TextCorpus,
    *,
    score: Callable[[LlamaForCausalLM], float],
    watch: Callable[[float], None] = lambda seconds_left: None,
) -> Converted:
    """Swap the attention of a copy and train it; the control skips alignment, which has nothing to align.

    Args:
        original: the softmax model, not changed.
        conversion, recipe, corpus: what is done.
        score: called with the model, in evaluation mode, after the swap and every `evaluate_every` steps of a stage.
        watch: called now and then with the seconds that the rest of the training will take if a step goes on as it does
            and later stages read as many tokens a second; with 0 while a stage compiles kernels and has no pace.

    Raises:
        ArithmeticError: a loss is not finite.
    """
    device = original.device
    model = copy.deepcopy(original)
    if conversion.layers != CONTROL.layers:
        torch.manual_seed(conversion.seed)
        swap_attention(model, conversion.rule, layers=conversion.layers, keep_teacher=True)
    swapped = sorted(swapped_layers(model))
    stages = [stage for stage in recipe.stages if swapped or stage is not recipe.align]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    original.requires_grad_(False)
    points = [("transfer", 0, score(model.eval()))]
    seconds = {}
    read = 0
    for place, stage in enumerate(stages):
        # The order is another than that in which the softmax model was trained, and differs between stages.
        order = 100 * (conversion.seed + 1) + place
        rows = TrainingRows(corpus.train, stage.row_length, stage.rows_per_batch, order, device)
        training = _StageTraining(model, original, stage, rows)
        later = sum(tokens_of(following) for following in stages[place + 1 :])
        for steps in training.run():
            watch(training.seconds_per_step * (stage.steps - steps + later / tokens_of_step(stage)))
            if steps % stage.evaluate_every == 0 or steps == stage.steps:
                points.append((stage.section, read + steps * tokens_of_step(stage), score(model.eval())))
        seconds[stage.section] = training.seconds
        read += tokens_of(stage)
    return Converted(
        model=model,
        swapped=swapped,
        points=points,
        stage_seconds=seconds,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


class _StageTraining:
    """The training of one stage.

    Attributes:
        seconds: of its steps so far, not of what happens between them where it stops.
    """

    def __init__(
        self, model: LlamaForCausalLM, original: LlamaForCausalLM, stage: StageConfig, rows: TrainingRows
    ) -> None:
        self._model, self._stage, self._rows = model, stage, rows
        self._loss_of = partial(_LOSSES[stage.section], original, stage)
        self._paces: list[float] = []
        self.seconds = 0.0

    @property
    def seconds_per_step(self) -> float:
        """As a rule; 0 until the second stop, since kernels are compiled before the first."""
        return statistics.median(self._paces[1:] or [0.0])

    def run(self) -> Iterator[int]:
        """Train to the end; yields the number of steps done, at least wherever `evaluate_every` divides it.

        Raises:
            ArithmeticError: the loss is not finite.
        """
        stage, model = self._stage, self._model
        choose_trained_parameters(model, stage)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = parameter_groups(model, stage.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=stage.learning_rate, betas=stage.betas, fused=True)
        scheduler = LambdaLR(optimizer, partial(learning_rate_factor, settings=stage))
        stopped = 0
        began = time.perf_counter()
        for step, (tokens, _) in enumerate(self._rows.batches(stage.steps), start=1):
            model.train()
            with autocast(model.device):
                loss = self._loss_of(model, tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, stage.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            if step - stopped == _PACED or step % stage.evaluate_every == 0 or step == stage.steps:
                if not math.isfinite(loss.item()):  # waits for the device
                    raise ArithmeticError(f"the loss of {stage.section} is not finite after {step} steps")
                spent = time.perf_counter() - began
                self._paces.append(spent / (step - stopped))
                self.seconds, stopped = self.seconds + spent, step
                yield step
                began = time.perf_counter()


def _align(original: Any, stage: StageConfig, model: Any, tokens: Tensor) -> Tensor:
    with teacher_forced(swapped_layers(model).values()) as errors:
        model.model(input_ids=tokens, use_cache=False)
    return torch.stack(errors).mean()


def _distill(original: Any, stage: DistillationConfig, model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = original(input_ids=tokens, use_cache=False).logits
    found = model(input_ids=tokens, use_cache=False).logits
    loss = divergence(found, wanted)
    return loss + stage.text_weight * next_token_loss(found, tokens) if stage.text_weight else loss


def _finetune(original: Any, stage: StageConfig, model: Any, tokens: Tensor) -> Tensor:
    return next_token_loss(model(input_ids=tokens, use_cache=False).logits, tokens)


_LOSSES: dict[str, Callable[..., Tensor]] = {"align": _align, "distill": _distill, "finetune": _finetune}
