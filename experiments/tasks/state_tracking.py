"""State tracking: parity, word problems of groups, modular arithmetic."""

from dataclasses import dataclass
from functools import cache
from itertools import permutations

import torch
from torch import Tensor

from experiments.tasks.task import IGNORED, Batch, Task, second_half

_DEGREES = {"S3": 3, "S5": 5, "A5": 5}
PLUS, MINUS, TIMES, OPEN, CLOSE = range(5)  # symbols after the digits


@dataclass(frozen=True, kw_only=True)
class Parity(Task):
    """Running parity of uniform bits: the smallest task that needs a transition with a negative eigenvalue.

    Answered at every token, graded in the second half; arXiv:2411.12537, table 2, answers at the last token only.
    """

    @property
    def sizes(self) -> tuple[int, int]:
        return 2, 2

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        bits = torch.randint(2, (batch_size, length), generator=generator)
        targets = bits.cumsum(1) % 2
        return Batch(bits, targets, second_half(targets))


@dataclass(frozen=True, kw_only=True)
class GroupWord(Task):
    """Running product in a group of permutations, graded in the second half (arXiv:2411.12537, arXiv:2502.10297).

    Swaps of S5 are reflections, which one Householder factor per token can be. S3 has rotations, which need two, and
    so has A5; a cycle of all five objects in S5 needs four. With `tokens_per_move` above 1, every move is followed by
    blanks and answered at the last of them, so that a layer has several transitions per move. A length counts moves.
    """

    group: str
    swaps_only: bool = False
    tokens_per_move: int = 1

    @property
    def sizes(self) -> tuple[int, int]:
        elements, moves = _table(self.group, self.swaps_only).shape
        return moves + 1, elements  # the last symbol is the blank

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw moves, uniform (with the identity among them)."""
        table = _table(self.group, self.swaps_only)
        moves = torch.randint(table.shape[1], (batch_size, length), generator=generator)
        products, element = [], torch.zeros(batch_size, dtype=torch.long)
        for t in range(length):
            element = table[element, moves[:, t]]
            products.append(element)
        inputs = torch.full((batch_size, length, self.tokens_per_move), table.shape[1])
        targets = torch.full_like(inputs, IGNORED)
        inputs[:, :, 0] = moves
        targets[:, :, -1] = torch.stack(products, dim=1)
        inputs, targets = inputs.flatten(1), targets.flatten(1)
        return Batch(inputs, targets, second_half(targets))


@cache
def _table(group: str, swaps_only: bool) -> Tensor:
    """`table[element, move]`: the element reached, element 0 being the identity; `[elements, moves]` int64."""
    elements = [p for p in permutations(range(_DEGREES[group])) if group[0] == "S" or _is_even(p)]
    index = {element: i for i, element in enumerate(elements)}
    moves = [p for p in elements if not swaps_only or sum(p[i] != i for i in range(len(p))) in (0, 2)]
    table = [[index[tuple(element[i] for i in move)] for move in moves] for element in elements]
    return torch.tensor(table, device="cpu")  # whatever the default device is while models are being counted


def _is_even(p: tuple[int, ...]) -> bool:
    return sum(p[i] > p[j] for i in range(len(p)) for j in range(i + 1, len(p))) % 2 == 0


@dataclass(frozen=True, kw_only=True)
class ModularArithmetic(Task):
    """Value of every prefix of an expression such as `3 + 2 * 4 - 1`, modulo a number (arXiv:2411.12537, table 2).

    Inside brackets, the value of what is inside the innermost one so far. Products bind before sums. A length counts
    tokens and is odd. Graded outside brackets, in the second half.
    """

    modulus: int = 5
    multiplication: bool = True
    brackets: bool = False
    max_depth: int = 8

    @property
    def sizes(self) -> tuple[int, int]:
        return self.modulus + 5, self.modulus

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw expressions; an even length is rounded up to the next odd one."""
        length += 1 - length % 2
        machine = _Machine(self, batch_size, generator)
        steps = [machine.step(length - 1 - t) for t in range(length)]
        inputs, targets, depth = (torch.stack(column, dim=1) for column in zip(*steps, strict=True))
        return Batch(inputs, targets, second_half(targets) & (depth == 0))


class _Machine:
    """Drawing of one token per row; the value of each open bracket is kept as `total + sign * product`."""

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

    def _value(self) -> Tensor:
        at = (self.rows, self.depth)
        return (self.total[at] + self.sign[at] * self.product[at]) % self.task.modulus

    def step(self, remaining: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token, target and depth after it, each `[rows]`, with `remaining` tokens to follow."""
        m = self.task.modulus
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

        current = self._value()
        self._start_term(gives_operator, operator, current)
        self._open(opens)
        self.depth = self.depth - closes.long()
        answered = gives_digit | closes
        self._operand(answered, torch.where(closes, current, digit))
        self.wants_operand = ~answered
        return token, torch.where(answered, self._value(), IGNORED), self.depth.clone()

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
