"""Multi-query associative recall: key-value pairs, then some of the keys again, and the value of each is asked.

The gap between the pairs and a question follows a power law, as in text. A state of K channels per head holds about K
pairs without interference: `num_pairs` against head dimension decides whether the task tells models apart.
"""

from dataclasses import dataclass

import torch

from experiments.task import IGNORED, Batch, Task, register_task

__all__ = ["RECALL", "RECALL_LARGE", "RECALL_LONG", "Recall"]


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """`num_pairs` pairs, a blank stretch with each key asked once at a random position."""

    title = "multi-query associative recall"
    source = "Zoology, arXiv:2312.04927 (there: random symbols between the questions; here: blanks)"

    num_pairs: int = 8
    num_keys: int = 64
    num_values: int = 64
    power: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.num_pairs <= self.num_keys:
            raise ValueError(
                f"task {self.name!r}: num_pairs must be between 1 and num_keys={self.num_keys}, got {self.num_pairs}"
            )

    @property
    def vocab_size(self) -> int:
        """Keys, values, blank."""
        return self.num_keys + self.num_values + 1

    @property
    def num_classes(self) -> int:
        """The values."""
        return self.num_values

    @property
    def shortest(self) -> int:
        """All pairs and one question each."""
        return 3 * self.num_pairs

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw pairs and positions."""
        self.check_length(length)
        n = self.num_pairs
        keys = torch.rand(batch_size, self.num_keys, generator=generator).topk(n).indices
        values = torch.randint(self.num_values, (batch_size, n), generator=generator)
        inputs = torch.full((batch_size, length), self.num_keys + self.num_values)
        inputs[:, 0 : 2 * n : 2] = keys
        inputs[:, 1 : 2 * n : 2] = self.num_keys + values
        gaps = torch.arange(1, length - 2 * n + 1).float()
        weights = gaps.pow(self.power - 1).expand(batch_size, -1)
        positions = 2 * n + torch.multinomial(weights, n, generator=generator)
        inputs.scatter_(1, positions, keys)
        targets = torch.full_like(inputs, IGNORED).scatter_(1, positions, values)
        return Batch(inputs, targets, targets != IGNORED)


RECALL = register_task(Recall(name="recall"))
RECALL_LARGE = register_task(Recall(name="recall_large", num_pairs=64, num_keys=4096, num_values=4096))
RECALL_LONG = register_task(Recall(name="recall_long", num_pairs=256, num_keys=512, num_values=256))
