"""Parity: random bits, and at every token whether the ones so far are odd.

The smallest task that needs a transition with a negative eigenvalue: the state has to change sign with every one.
"""

from dataclasses import dataclass

import torch

from experiments.task import Batch, Task, register_task, second_half

__all__ = ["PARITY", "Parity"]


@dataclass(frozen=True, kw_only=True)
class Parity(Task):
    """Running parity of uniform bits, answered at every token; graded in the second half."""

    title = "parity of random bits"
    source = "arXiv:2411.12537, table 2 (there: answered at the last token only)"

    @property
    def vocab_size(self) -> int:
        """The two bits."""
        return 2

    @property
    def num_classes(self) -> int:
        """Even, odd."""
        return 2

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw bits."""
        bits = torch.randint(2, (batch_size, length), generator=generator)
        targets = bits.cumsum(1) % 2
        return Batch(bits, targets, second_half(targets))


PARITY = register_task(Parity(name="parity"))
