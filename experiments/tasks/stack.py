"""Stacks: pushes and pops on many stacks at once; what comes off is asked before it is shown."""

from dataclasses import dataclass

import torch

from experiments.task import IGNORED, Batch, Task, register_task

__all__ = ["STACK", "STACK_LARGE", "Stack"]


@dataclass(frozen=True, kw_only=True)
class Stack(Task):
    """Every operation is two symbols: "push on i" or "pop i", then the element. A length counts operations."""

    title = "last in, first out"
    source = "arXiv:2510.26692, section 5.1 (synthetic tests: 64 stacks)"
    length_is = "operations"

    num_stacks: int = 8
    num_symbols: int = 16

    @property
    def vocab_size(self) -> int:
        """Pushes, pops, elements."""
        return 2 * self.num_stacks + self.num_symbols

    @property
    def num_classes(self) -> int:
        """The elements."""
        return self.num_symbols

    @property
    def shortest(self) -> int:
        """A push and a pop."""
        return 2

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw operations: a pop with probability one half where the stack is not empty."""
        self.check_length(length)
        rows = torch.arange(batch_size)
        which = torch.randint(self.num_stacks, (batch_size, length), generator=generator)
        pops = torch.rand(batch_size, length, generator=generator) < 0.5
        pushed = torch.randint(self.num_symbols, (batch_size, length), generator=generator)
        heights = torch.zeros(batch_size, self.num_stacks, dtype=torch.long)
        contents = torch.zeros(batch_size, self.num_stacks, length + 1, dtype=torch.long)
        elements, popped = [], []
        for t in range(length):
            stack, symbol = which[:, t], pushed[:, t]
            height = heights[rows, stack]
            pop = pops[:, t] & (height > 0)
            element = torch.where(pop, contents[rows, stack, (height - 1).clamp(min=0)], symbol)
            contents[rows, stack, height] = symbol
            heights[rows, stack] = torch.where(pop, height - 1, height + 1)
            elements.append(element)
            popped.append(pop)
        element, pop = torch.stack(elements, dim=1), torch.stack(popped, dim=1)
        operation = torch.where(pop, self.num_stacks + which, which)
        inputs = torch.stack([operation, 2 * self.num_stacks + element], dim=2).flatten(1)
        asked = torch.where(pop, element, IGNORED)
        targets = torch.stack([asked, torch.full_like(asked, IGNORED)], dim=2).flatten(1)
        return Batch(inputs, targets, targets != IGNORED)


STACK = register_task(Stack(name="stack"))
STACK_LARGE = register_task(Stack(name="stack_large", num_stacks=64, num_symbols=64))
