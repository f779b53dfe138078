"""Keys and values of softmax layers for rows of their own lengths."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

__all__ = ["RowKeyValues"]


class RowKeyValues(StaticLayer):
    """A static layer that writes each row's new keys at that row's own position.

    The key of position p is in column p, whatever the other rows are. Columns at and after a row's end hold anything:
    the caller's mask must hide them. transformers makes masks for queries behind the last column, so that causality
    hides nothing more.

    Args:
        max_cache_len: columns.
        position: `[N, 1]` int64, of the next token of each row; it stays at its address. All new tokens must be below
            `max_cache_len`.
    """

    def __init__(self, max_cache_len: int, position: Tensor) -> None:
        super().__init__(max_cache_len)
        self.position = position

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the tokens of each row, as many of all, and return all columns."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        columns, num_tokens = self.position, key_states.shape[2]
        if num_tokens != 1:
            columns = columns + torch.arange(num_tokens, device=columns.device)
        columns = columns[:, None, :, None]
        self.keys.scatter_(2, columns.expand_as(key_states), key_states)
        self.values.scatter_(2, columns.expand_as(value_states), value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """All columns."""
        return self.max_cache_len
