"""Tasks: random sequences with a known answer at every token that is trained on, and their registry."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from deltazoo.names import unknown

__all__ = ["IGNORED", "Batch", "Task", "get_task", "list_tasks", "register_task"]

IGNORED = -100
"""Target of tokens that carry no answer."""


class Batch(NamedTuple):
    """Sequences and the answer that a model should give at each token."""

    inputs: Tensor
    """`[B, T]` int64 symbols, or `[B, T, C]` float32 measurements."""
    targets: Tensor
    """`[B, T]` int64 classes, `IGNORED` where nothing is asked."""
    graded: Tensor
    """`[B, T]` bool: the answers that the reported accuracy counts."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A family of sequences of any length; a subclass holds its parameters and says how to draw a batch.

    A task is data: two tasks with equal fields are the same task. Nothing is read from a network; the same generator
    state gives the same batch.
    """

    name: str
    """Registry name, also in result files."""
    title: ClassVar[str]
    """What it is, in a few words, for the page."""
    source: ClassVar[str]
    """Paper the task comes from, and what differs here."""
    length_is: ClassVar[str] = "tokens"
    """What a length counts."""
    metric: ClassVar[str] = "accuracy"
    """"accuracy" (share of the graded answers, higher is better) or "bits" (per graded token, lower is better)."""
    channels: ClassVar[int | None] = None
    """Measurements per token; None for tasks over symbols."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of input symbols (0 for measurements)."""

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of possible answers."""

    @property
    def chance(self) -> float:
        """Accuracy of the best constant guess."""
        return 1 / self.num_classes

    @property
    def shortest(self) -> int:
        """Smallest length that makes sense."""
        return 1

    @abstractmethod
    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw `batch_size` sequences of one length."""

    def test_sample(self, condition: int | str, batch_size: int, generator: torch.Generator) -> Batch:
        """Draw test sequences under a condition: a length, or whatever else the task can be tested by."""
        if not isinstance(condition, int):
            raise ValueError(f"task {self.name!r} is tested by length, got the condition {condition!r}")
        return self.sample(batch_size, condition, generator)

    def check_length(self, length: int) -> None:
        """Refuse a length that the task cannot have.

        Raises:
            ValueError: says which lengths are possible.
        """
        if length < self.shortest:
            raise ValueError(
                f"task {self.name!r} needs a length of at least {self.shortest} {self.length_is}, got {length}"
            )


_TASKS: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Make a task known under its name, and return it; registering an equal task again changes nothing.

    Raises:
        ValueError: the name is taken by a different task.
    """
    known = _TASKS.setdefault(task.name, task)
    if known != task:
        raise ValueError(f"the task name {task.name!r} is taken by another task: {known}")
    return task


def get_task(name: str) -> Task:
    """The registered task of that name.

    Raises:
        ValueError: no such task; names the nearest and lists them all.
    """
    if name not in _TASKS:
        raise ValueError(unknown("task", name, list_tasks()))
    return _TASKS[name]


def list_tasks() -> list[str]:
    """Names of all registered tasks, in the order of registration."""
    return list(_TASKS)


def second_half(targets: Tensor) -> Tensor:
    """Graded where an answer is asked in the second half of the sequence: `[B, T]` bool."""
    graded = targets != IGNORED
    graded[:, : targets.shape[1] // 2] = False
    return graded
