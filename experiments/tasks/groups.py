"""Word problems of groups: a sequence of permutations, and at every token the product of all so far.

Swaps of S5 are reflections, which one Householder factor per token can be. S3 has rotations, which need two, and so has
A5, the rotations of an icosahedron; a cycle of all five objects in S5 needs four. The whole of S5 and A5 are beyond any
fixed-depth model without state-dependent transitions.
"""

from dataclasses import dataclass
from functools import cache
from itertools import permutations

import torch
from torch import Tensor

from experiments.task import IGNORED, Batch, Task, register_task, second_half

__all__ = ["A5", "S3", "S5", "S5_SLOW", "S5_SWAPS", "GroupWord"]

_DEGREES = {"S3": 3, "S5": 5, "A5": 5}


@dataclass(frozen=True, kw_only=True)
class GroupWord(Task):
    """Running product in a group of permutations, graded in the second half.

    With `tokens_per_move` above 1, every move is followed by blanks and answered at the last of them, so that a layer
    has several transitions per move.
    """

    title = "word problem of a group"
    source = "arXiv:2411.12537, section 5 and arXiv:2502.10297 (there: answered at every token, as here)"
    length_is = "moves"

    group: str
    swaps_only: bool = False
    tokens_per_move: int = 1

    def __post_init__(self) -> None:
        if self.group not in _DEGREES:
            raise ValueError(f"task {self.name!r}: the group must be one of {', '.join(_DEGREES)}, got {self.group!r}")
        if self.tokens_per_move < 1:
            raise ValueError(f"task {self.name!r}: tokens_per_move must be at least 1, got {self.tokens_per_move}")
        if self.swaps_only and self.group == "A5":
            raise ValueError(f"task {self.name!r}: swaps are odd and lie outside A5")

    @property
    def vocab_size(self) -> int:
        """The moves, and a blank."""
        return _table(self.group, self.swaps_only).shape[1] + 1

    @property
    def num_classes(self) -> int:
        """The group's elements."""
        return _table(self.group, self.swaps_only).shape[0]

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw moves, uniform (with the identity among them)."""
        table = _table(self.group, self.swaps_only)
        moves = torch.randint(table.shape[1], (batch_size, length), generator=generator)
        products, element = [], torch.zeros(batch_size, dtype=torch.long)
        for t in range(length):
            element = table[element, moves[:, t]]
            products.append(element)
        inputs = torch.full((batch_size, length, self.tokens_per_move), self.vocab_size - 1)
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


S3 = register_task(GroupWord(name="s3", group="S3"))
S5_SWAPS = register_task(GroupWord(name="s5_swaps", group="S5", swaps_only=True))
S5 = register_task(GroupWord(name="s5", group="S5"))
S5_SLOW = register_task(GroupWord(name="s5_slow", group="S5", tokens_per_move=4))
A5 = register_task(GroupWord(name="a5", group="A5"))
