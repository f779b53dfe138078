"""Training and testing of one configuration: a plain loop with a loss on every token that has an answer."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.ops import resolve_backend
from experiments.configurations import Configuration
from experiments.network import LabModel, build_model
from experiments.recipe import Recipe
from experiments.task import Batch, Task
from experiments.training_update import Questions, Update, answer, training_stream

__all__ = ["Outcome", "Score", "run_configuration"]

_CURVE_POINTS = 100
_TEST_SEED = 2**31 - 1
_TOKENS_PER_TEST_BATCH = 2**15


@dataclass(frozen=True)
class Score:
    """Of the graded answers under one condition."""

    accuracy: float
    bits: float
    """Cross entropy in bits per answer."""
    answers: int


@dataclass(frozen=True)
class Outcome:
    """What one configuration reached."""

    parameters: int
    scores: dict[str, Score]
    """By test condition."""
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, loss in nats, accuracy) of training batches before their update, averaged over the steps between."""
    device: str = "cpu"
    started: float | None = None
    """Seconds since the epoch."""
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def run_configuration(
    task: Task,
    configuration: Configuration,
    recipe: Recipe,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """Train a configuration on a task and test it.

    The same seed gives the same numbers. All configurations of one seed see the same data.

    Args:
        task, configuration, recipe: what to run.
        seed: of initialisation and training data; test data never depend on it.
        device: where. On an NVIDIA GPU convolutions and gated norms run in the fused kernels.
        progress: called with the number of finished steps.

    Raises:
        ValueError: lengths that the task cannot have.
        ArithmeticError: the loss, in training or in a test, is not finite.
    """
    task.check_length(recipe.train_lengths[0])
    device = torch.device(device)
    began, started, cpu_started = time.time(), time.perf_counter(), time.process_time()
    torch.manual_seed(seed)
    model = build_model(configuration, recipe, task, fused_kernels=_has_kernels(device, recipe)).to(device)
    data = torch.Generator().manual_seed(seed)
    curve = _Curve(recipe.steps)
    with training_stream(device):
        update = Update(model, recipe)
        for step, questions in enumerate(_training_batches(task, recipe, data, device)):
            if curve.add(step, update(questions, recipe.learning_rate * _schedule(step, recipe))):
                if not math.isfinite(curve.points[-1][1]):
                    raise ArithmeticError(
                        f"{configuration.name} on {task.name}: the loss is {curve.points[-1][1]} at step {step}"
                    )
                progress(step + 1)
    scores = {
        str(condition): _test(model, task, condition, index, recipe, device)
        for index, condition in enumerate(recipe.test)
    }
    return Outcome(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        scores=scores,
        curve=curve.points,
        device=str(device),
        started=round(began, 2),
        seconds=round(time.perf_counter() - started, 2),
        cpu_seconds=round(time.process_time() - cpu_started, 2),
    )


def _has_kernels(device: torch.device, recipe: Recipe) -> bool:
    dim = recipe.head_dim
    name, _ = resolve_backend(None, device=device, dtype=torch.float32, head_k_dim=dim, head_v_dim=dim)
    return device.type == "cuda" and name == "triton"


def _training_batches(
    task: Task, recipe: Recipe, generator: torch.Generator, device: torch.device
) -> Iterator[Questions]:
    """One batch per step; on a GPU all of one shape, since an update is recorded there."""
    longest = task.sample(1, recipe.train_lengths[1], torch.Generator()).targets.shape[1]
    padded_to = longest if device.type == "cuda" else None
    for start in range(0, recipe.steps, recipe.draw_ahead):
        steps = min(recipe.draw_ahead, recipe.steps - start)
        length = int(torch.randint(recipe.train_lengths[0], recipe.longest(start) + 1, (), generator=generator))
        drawn = task.sample(steps * recipe.batch_size, length, generator)
        for parts in zip(*(x.split(recipe.batch_size) for x in drawn), strict=True):
            yield Questions.of(Batch(*parts), device, padded_to=padded_to)


class _Curve:
    """Averages of loss and accuracy, read from the device only where a point is due."""

    def __init__(self, steps: int) -> None:
        self.points: list[tuple[int, float, float]] = []
        self._steps, self._every = steps, max(1, steps // _CURVE_POINTS)
        self._sums: list[Tensor] = []

    def add(self, step: int, found: Tensor) -> bool:
        self._sums.append(found)
        if (step + 1) % self._every and step + 1 < self._steps:
            return False
        mean_loss, accuracy = torch.stack(self._sums).mean(0).tolist()
        self.points.append((step + 1, round(mean_loss, 5), round(accuracy, 5)))
        self._sums.clear()
        return True


def _schedule(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine to zero."""
    warmup = max(1, round(recipe.warmup * recipe.steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, recipe.steps - warmup)))


@torch.no_grad()
def _test(model: LabModel, task: Task, condition: int | str, index: int, recipe: Recipe, device: torch.device) -> Score:
    generator = torch.Generator().manual_seed(_TEST_SEED - index)
    whole = task.test_sample(condition, recipe.test_sequences, generator)
    rows = max(1, _TOKENS_PER_TEST_BATCH // whole.inputs.shape[1])
    hits, nats, answers = 0, 0.0, 0
    for parts in zip(*(x.split(rows) for x in whole), strict=True):
        questions = Questions.of(Batch(*parts), device, graded_only=True)
        logits = answer(model, questions, recipe)
        hits += int((logits.argmax(-1) == questions.answers).sum())
        nats += float(F.cross_entropy(logits, questions.answers, reduction="sum"))
        answers += len(questions.answers)
    if not math.isfinite(nats):
        raise ArithmeticError(f"{task.name}, tested at {condition}: the answers cost {nats} nats")
    return Score(round(hits / answers, 5), round(nats / answers / math.log(2), 5), answers)
