"""Reset: key-value pairs that a mark declares void, then new pairs, and the new ones are asked.

A decay gate can clear the state at the mark; the delta rule alone has to overwrite what interferes. In the selective
form some of the pairs before the mark stay valid, so clearing everything is wrong too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.task import IGNORED, Batch, Task, register_task

__all__ = ["RESET", "RESET_SMALL", "SELECTIVE_RESET", "Reset"]


@dataclass(frozen=True, kw_only=True)
class Reset(Task):
    """`length` void pairs and `num_kept` kept ones in random order, the mark, `num_new` new pairs; then the questions.

    Void and new pairs use the same keys; kept ones have keys of their own, so that a pair alone shows whether it
    survives.
    """

    title = "forgetting at a mark"
    source = "ours, after the motivation of arXiv:2412.06464"
    length_is = "void pairs"

    num_new: int = 8
    num_kept: int = 0
    num_keys: int = 64
    num_values: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.num_new <= self.num_keys or not 0 <= self.num_kept <= self.num_keys:
            raise ValueError(
                f"task {self.name!r}: num_new must be between 1 and num_keys={self.num_keys} and num_kept between "
                f"0 and num_keys, got {self.num_new} and {self.num_kept}"
            )

    @property
    def vocab_size(self) -> int:
        """Ordinary keys, kept keys, values, the mark, and the mark before the questions."""
        return 2 * self.num_keys + self.num_values + 2

    @property
    def num_classes(self) -> int:
        """The values."""
        return self.num_values

    def check_length(self, length: int) -> None:
        """Void pairs have distinct keys."""
        super().check_length(length)
        if length > self.num_keys:
            raise ValueError(
                f"task {self.name!r} has {self.num_keys} keys, so at most as many void pairs, got {length}"
            )

    def _distinct(self, batch_size: int, count: int, generator: torch.Generator) -> Tensor:
        return torch.rand(batch_size, self.num_keys, generator=generator).topk(count).indices

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw pairs."""
        self.check_length(length)
        void = self._distinct(batch_size, length, generator)
        kept = self.num_keys + self._distinct(batch_size, self.num_kept, generator)
        before = torch.cat([void, kept], dim=1)
        before = before.gather(1, torch.rand(before.shape, generator=generator).argsort(1))
        new = self._distinct(batch_size, self.num_new, generator)
        values = torch.randint(self.num_values, (batch_size, before.shape[1] + self.num_new), generator=generator)

        pairs = torch.stack([torch.cat([before, new], dim=1), 2 * self.num_keys + values], dim=2)
        split = before.shape[1]
        asked = torch.cat([kept, new], dim=1)
        asked = asked.gather(1, torch.rand(asked.shape, generator=generator).argsort(1))
        marks = torch.tensor([self.vocab_size - 2, self.vocab_size - 1]).expand(batch_size, 2)
        inputs = torch.cat(
            [pairs[:, :split].flatten(1), marks[:, :1], pairs[:, split:].flatten(1), marks[:, 1:], asked], dim=1
        )
        # Of two pairs with one key the later counts: a void key may come back as a new one.
        position = torch.where(pairs[:, None, :, 0] == asked[..., None], torch.arange(pairs.shape[1]), -1).amax(-1)
        targets = torch.full_like(inputs, IGNORED)
        targets[:, -asked.shape[1] :] = values.gather(1, position)
        return Batch(inputs, targets, targets != IGNORED)


RESET = register_task(Reset(name="reset"))
RESET_SMALL = register_task(Reset(name="reset_small", num_new=4, num_keys=32))
SELECTIVE_RESET = register_task(Reset(name="selective_reset", num_kept=4, num_new=4))
