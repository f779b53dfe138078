"""A task: random sequences with a known answer at every token that is trained on."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

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

    Nothing is read from a network; the same generator state gives the same batch.
    """

    name: str
    metric: ClassVar[str] = "accuracy"
    """"accuracy" (share of the graded answers, higher is better) or "bits" (per graded token, lower is better)."""
    channels: ClassVar[int | None] = None
    """Measurements per token; None for tasks over symbols."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Numbers of input symbols (0 for measurements) and of possible answers."""

    @property
    def shortest(self) -> int:
        """The smallest length that makes sense."""
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
        """Refuse a length that the task cannot have."""
        if length < self.shortest:
            raise ValueError(f"task {self.name!r} needs a length of at least {self.shortest}, got {length}")


def second_half(targets: Tensor) -> Tensor:
    """Graded where an answer is asked in the second half of the sequence: `[B, T]` bool."""
    graded = targets != IGNORED
    graded[:, : targets.shape[1] // 2] = False
    return graded


def asked_alone(inputs: Tensor, targets: Tensor) -> Batch:
    """A batch whose every answer is graded."""
    return Batch(inputs, targets, targets != IGNORED)
