"""Recall with overwrites: the same keys are written again and again, and only the last value of each counts.

What separates the delta rule from linear attention: adding the new value leaves the old ones in place.
"""

from dataclasses import dataclass

import torch

from experiments.task import IGNORED, Batch, Task, register_task

__all__ = ["OVERWRITE", "OVERWRITE_LARGE", "Overwrite"]


@dataclass(frozen=True, kw_only=True)
class Overwrite(Task):
    """Writes `key value` on a few keys in random order, each at least once; then every key is asked.

    A length counts writes.
    """

    title = "recall with overwrites"
    source = "multi-query associative recall (arXiv:2312.04927) with repeated keys; ours"
    length_is = "writes"

    num_keys: int = 6
    num_values: int = 16
    key_pool: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.num_keys <= self.key_pool:
            raise ValueError(
                f"task {self.name!r}: num_keys must be between 1 and key_pool={self.key_pool}, got {self.num_keys}"
            )

    @property
    def vocab_size(self) -> int:
        """Keys, values, and the mark before the questions."""
        return self.key_pool + self.num_values + 1

    @property
    def num_classes(self) -> int:
        """The values."""
        return self.num_values

    @property
    def shortest(self) -> int:
        """One write per key."""
        return self.num_keys

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw writes."""
        self.check_length(length)
        n = self.num_keys
        keys = torch.rand(batch_size, self.key_pool, generator=generator).topk(n).indices
        slots = torch.randint(n, (batch_size, length), generator=generator)
        first = torch.rand(batch_size, length, generator=generator).topk(n).indices
        slots.scatter_(1, first, torch.arange(n).expand(batch_size, n))
        values = torch.randint(self.num_values, (batch_size, length), generator=generator)

        order = torch.arange(length).expand(batch_size, length)
        is_slot = slots[:, None] == torch.arange(n)[:, None]
        last = torch.where(is_slot, order[:, None], -1).amax(-1)
        asked = torch.rand(batch_size, n, generator=generator).argsort(1)

        writes = torch.stack([keys.gather(1, slots), self.key_pool + values], dim=2).flatten(1)
        mark = torch.full((batch_size, 1), self.vocab_size - 1)
        inputs = torch.cat([writes, mark, keys.gather(1, asked)], dim=1)
        targets = torch.full_like(inputs, IGNORED)
        targets[:, -n:] = values.gather(1, last).gather(1, asked)
        return Batch(inputs, targets, targets != IGNORED)


OVERWRITE = register_task(Overwrite(name="overwrite"))
OVERWRITE_LARGE = register_task(Overwrite(name="overwrite_large", num_keys=32, num_values=128, key_pool=256))
