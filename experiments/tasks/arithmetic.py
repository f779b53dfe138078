"""Modular arithmetic: expressions such as `3 + 2 * 4 - 1`, with or without brackets, and their value modulo m.

The bracket machine draws and evaluates whole batches at once: one pass over the tokens, a small stack per row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.task import IGNORED, Batch, Task, register_task, second_half

__all__ = ["BRACKETS", "NO_BRACKETS", "ModularArithmetic"]

PLUS, MINUS, TIMES, OPEN, CLOSE = range(5)  # symbols after the digits


@dataclass(frozen=True, kw_only=True)
class ModularArithmetic(Task):
    """Value of every prefix of an expression; inside brackets, of what is inside the innermost one so far.

    Products bind before sums. A length counts tokens and is odd. Graded outside brackets, in the second half.
    """

    title = "modular arithmetic"
    source = "arXiv:2411.12537, table 2 (there: answered at the last token only)"

    modulus: int = 5
    multiplication: bool = True
    brackets: bool = False
    max_depth: int = 8

    @property
    def vocab_size(self) -> int:
        """Digits, operators, brackets."""
        return self.modulus + 5

    @property
    def num_classes(self) -> int:
        """The residues."""
        return self.modulus

    def check_length(self, length: int) -> None:
        """Only odd lengths are whole expressions."""
        super().check_length(length)
        if length % 2 == 0:
            raise ValueError(f"task {self.name!r} has expressions of odd length only, got {length}")

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw expressions; an even length is rounded up to the next odd one."""
        length += 1 - length % 2
        machine = _Machine(self, batch_size, generator)
        steps = [machine.step(length - 1 - t) for t in range(length)]
        inputs, targets = (torch.stack(column, dim=1) for column in zip(*[step[:2] for step in steps], strict=True))
        depth = torch.stack([step[2] for step in steps], dim=1)
        return Batch(inputs, targets, second_half(targets) & (depth == 0))


class _Machine:
    """Draws one token per row and keeps the value of each open bracket as `total + sign * product`."""

    def __init__(self, task: ModularArithmetic, rows: int, generator: torch.Generator) -> None:
        self.task, self.generator = task, generator
        self.rows = torch.arange(rows)
        levels = task.max_depth + 1
        self.depth = torch.zeros(rows, dtype=torch.long)
        self.wants_operand = torch.ones(rows, dtype=torch.bool)
        self.total = torch.zeros(rows, levels, dtype=torch.long)
        self.sign = torch.ones(rows, levels, dtype=torch.long)
        self.product = torch.ones(rows, levels, dtype=torch.long)

    def _coin(self, probability: float) -> Tensor:
        return torch.rand(len(self.rows), generator=self.generator) < probability

    def step(self, remaining: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token, target and depth after it, each `[rows]`, with `remaining` tokens to follow."""
        m, at = self.task.modulus, (self.rows, self.depth)
        # "(" must be followed by an operand and its own ")", besides those that are open already; after ")" and
        # operators enough tokens must remain to close all brackets.
        may_open = self.wants_operand & (self.depth < self.task.max_depth) & (remaining >= self.depth + 2)
        opens = may_open & self._coin(0.3) if self.task.brackets else torch.zeros_like(may_open)
        must_close = ~self.wants_operand & (remaining < self.depth + 1)
        closes = ~self.wants_operand & (self.depth > 0) & (must_close | self._coin(0.3))
        digit = torch.randint(m, (len(self.rows),), generator=self.generator)
        operators = 3 if self.task.multiplication else 2
        operator = torch.randint(operators, (len(self.rows),), generator=self.generator)
        gives_digit = self.wants_operand & ~opens
        gives_operator = ~self.wants_operand & ~closes

        token = torch.where(gives_digit, digit, m + operator)
        token = torch.where(opens, m + OPEN, torch.where(closes, m + CLOSE, token))

        current = (self.total[at] + self.sign[at] * self.product[at]) % m
        self._start_term(gives_operator, operator, current)
        self._open(opens)
        self.depth = self.depth - closes.long()
        self._operand(gives_digit | closes, torch.where(closes, current, digit))

        answered = gives_digit | closes
        at = (self.rows, self.depth)
        value = (self.total[at] + self.sign[at] * self.product[at]) % m
        self.wants_operand = ~answered
        return token, torch.where(answered, value, IGNORED), self.depth.clone()

    def _start_term(self, where: Tensor, operator: Tensor, current: Tensor) -> None:
        at = (self.rows, self.depth)
        new_term = where & (operator != TIMES)
        self.total[at] = torch.where(new_term, current, self.total[at])
        self.product[at] = torch.where(new_term, 1, self.product[at])
        self.sign[at] = torch.where(new_term, torch.where(operator == MINUS, -1, 1), self.sign[at])

    def _open(self, where: Tensor) -> None:
        self.depth = self.depth + where.long()
        at = (self.rows, self.depth)
        for register, start in ((self.total, 0), (self.sign, 1), (self.product, 1)):
            register[at] = torch.where(where, start, register[at])

    def _operand(self, where: Tensor, value: Tensor) -> None:
        at = (self.rows, self.depth)
        self.product[at] = torch.where(where, self.product[at] * value % self.task.modulus, self.product[at])


NO_BRACKETS = register_task(ModularArithmetic(name="arithmetic"))
BRACKETS = register_task(ModularArithmetic(name="arithmetic_brackets", multiplication=False, brackets=True))
