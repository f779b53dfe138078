"""Rows of the training stream: which tokens each optimizer step sees, the same for every configuration of a seed."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

__all__ = ["TrainingRows"]


class TrainingRows:
    """Rows of `row_length` tokens with the tokens that follow each of them, in an order that the seed decides.

    An epoch cuts the stream into rows from a random offset on and visits each once, in random order. Rows begin where
    they may, within a file or at its start, and go on into the next file of the package.

    Args:
        tokens: `[N]` uint16, the training stream.
        row_length, rows_per_step: sizes of a batch.
        seed: of the order.
        device: where the stream lies and batches are made.

    Raises:
        ValueError: the stream is shorter than two rows.
    """

    def __init__(
        self, tokens: np.ndarray, row_length: int, rows_per_step: int, seed: int, device: torch.device | str
    ) -> None:
        self._rows_per_epoch = len(tokens) // row_length - 1  # the offset takes up to one row
        if self._rows_per_epoch < 1:
            raise ValueError(f"a stream of {len(tokens)} tokens has no two rows of {row_length}")
        self._row_length, self._rows_per_step, self._seed = row_length, rows_per_step, seed
        self._stream = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self._within_row = torch.arange(row_length + 1, device=device)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of all rows of an epoch."""
        return self._rows_per_epoch * self._row_length

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each step the tokens and their successors, both `[rows_per_step, row_length]` int64."""
        begins = self._begins()
        for _ in range(steps):
            first = torch.tensor([next(begins) for _ in range(self._rows_per_step)])
            first = first.to(self._stream.device, non_blocking=True)
            rows = self._stream[first[:, None] + self._within_row].long()
            yield rows[:, :-1], rows[:, 1:]

    def _begins(self) -> Iterator[int]:
        epoch = 0
        while True:
            numbers = np.random.default_rng((self._seed, epoch))
            offset = int(numbers.integers(self._row_length))
            yield from (offset + self._row_length * numbers.permutation(self._rows_per_epoch)).tolist()
            epoch += 1
