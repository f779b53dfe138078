"""A job of the lab: a small model trained on a task with known answers, and tested."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.configurations import parse_configuration
from experiments.experiment import Recipe
from experiments.loop import Loop
from experiments.network import LabModel, build_model
from experiments.runner import Job
from experiments.tasks import IGNORED, TASKS, Batch, Task

# Below this many steps along time the token loop beats the chunk form on a CPU, where a chunk is always 64 tokens.
_LOOP_UP_TO = 48
_TEST_SEED = 2**31 - 1
_TOKENS_PER_TEST_BATCH = 2**15


class Questions(NamedTuple):
    """A batch with its answered tokens picked out, on the device of the model."""

    inputs: Tensor
    tokens: Tensor
    """`[N]`, positions of the answers among the flattened tokens."""
    answers: Tensor
    """`[N]`."""
    graded: Tensor
    """`[N]` bool."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device, *, graded_only: bool = False) -> "Questions":
        """Pick the answered tokens, or only the graded ones."""
        tokens = (batch.graded if graded_only else batch.targets != IGNORED).flatten().nonzero()[:, 0]
        parts = (batch.inputs, tokens, batch.targets.flatten()[tokens], batch.graded.flatten()[tokens])
        return cls(*(x.to(device) for x in parts))


def train_and_test(job: Job, device: str, tick: Callable[[], None]) -> dict[str, Any]:
    """Train a configuration on a task and test it.

    The same seed gives the same numbers. All configurations of one seed see the same data, and test data never depend
    on the seed.

    Raises:
        ArithmeticError: the loss, in training or in a test, is not finite.
    """
    recipe, task, place = Recipe(**job["recipe"]), TASKS[job["task"]], torch.device(device)
    with _repeatable():
        torch.manual_seed(job["seed"])
        model = build_model(parse_configuration(job["configuration"]), recipe, task).to(place)
        loop = training_loop(model, recipe, task, job["seed"], place)
        if not loop.advance(recipe.steps, tick):
            raise ArithmeticError(f"the loss is {loop.losses[-1]} at step {loop.steps}")
        scores = {str(condition): _test(model, task, i, recipe, place) for i, condition in enumerate(recipe.test)}
    return {
        "steps": recipe.steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "scores": scores,
        "curve": loop.curve(),  # step, loss in nats, accuracy, before the update
    }


def training_loop(model: LabModel, recipe: Recipe, task: Task, seed: int, device: torch.device) -> Loop:
    """The training of a model on a task, with the accuracy on the graded answers beside the loss."""

    def figures_of(model: LabModel, questions: Questions) -> tuple[Tensor, Tensor]:
        logits = _answer(model, questions, recipe)
        loss = F.cross_entropy(logits, questions.answers)
        hits = (logits.detach().argmax(-1) == questions.answers) & questions.graded
        return loss, hits.sum() / questions.graded.sum().clamp(min=1)

    return Loop(
        model,
        training_batches(task, recipe, torch.Generator().manual_seed(seed), device),
        figures_of,
        rate=recipe.learning_rate,
        factor=recipe.rate_factor,
        weight_decay=recipe.weight_decay,
        betas=recipe.betas,
        clip=recipe.clip,
    )


def training_batches(
    task: Task, recipe: Recipe, generator: torch.Generator, device: torch.device
) -> Iterator[Questions]:
    """One batch per step."""
    for start in range(0, recipe.steps, recipe.draw_ahead):
        steps = min(recipe.draw_ahead, recipe.steps - start)
        length = int(torch.randint(recipe.train_lengths[0], recipe.longest(start) + 1, (), generator=generator))
        drawn = task.sample(steps * recipe.batch_size, length, generator)
        for parts in zip(*(x.split(recipe.batch_size) for x in drawn), strict=True):
            yield Questions.of(Batch(*parts), device)


def _answer(model: LabModel, questions: Questions, recipe: Recipe) -> Tensor:
    """Logits `[N, classes]` float32."""
    kind = questions.inputs.device.type
    short = questions.inputs.shape[1] * model.micro_steps <= _LOOP_UP_TO
    model.use_backend("reference" if kind == "cpu" and short else None)
    with torch.autocast(kind, torch.bfloat16, enabled=recipe.bf16):
        return model(questions.inputs, questions.tokens).float()


@torch.no_grad()
def _test(model: LabModel, task: Task, index: int, recipe: Recipe, device: torch.device) -> dict[str, float]:
    """Accuracy, cross entropy in bits per answer and number of the graded answers under a condition."""
    generator = torch.Generator().manual_seed(_TEST_SEED - index)
    whole = task.test_sample(recipe.test[index], recipe.test_sequences, generator)
    rows = max(1, _TOKENS_PER_TEST_BATCH // whole.inputs.shape[1])
    hits, nats, answers = 0, 0.0, 0
    for parts in zip(*(x.split(rows) for x in whole), strict=True):
        questions = Questions.of(Batch(*parts), device, graded_only=True)
        logits = _answer(model, questions, recipe)
        hits += int((logits.argmax(-1) == questions.answers).sum())
        nats += float(F.cross_entropy(logits, questions.answers, reduction="sum"))
        answers += len(questions.answers)
    if not math.isfinite(nats):
        raise ArithmeticError(f"{task.name}, tested at {recipe.test[index]}: the answers cost {nats} nats")
    bits = nats / answers / math.log(2)
    return {"accuracy": round(hits / answers, 5), "bits": round(bits, 5), "answers": answers}


@contextmanager
def _repeatable() -> Iterator[None]:
    """Inside, one thread, which always sums in one order, and deterministic kernels; denormals are zero.

    Matrices are small: more threads would cost more than they bring.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # only costs time
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(False)
