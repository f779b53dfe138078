"""Tensors of the formats made of ours, and taken apart again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["FORMS", "Form"]


class Form(NamedTuple):
    """How one parameter of theirs is made of ours."""

    made: Callable[[Sequence[Tensor], Any], Tensor]
    """Theirs, of ours in the order of the row and our configuration."""
    apart: Callable[[Tensor, Sequence[int], Any], Sequence[Tensor]]
    """Ours, of theirs, the number of rows that each of ours has, and our configuration."""


def _by_key_head(parts: Sequence[Tensor], config: Any) -> Tensor:
    return torch.cat([x.unflatten(0, (config.num_heads, -1)) for x in parts], dim=1).flatten(0, 1)


def _from_key_heads(x: Tensor, rows: Sequence[int], config: Any) -> list[Tensor]:
    parts = x.unflatten(0, (config.num_heads, -1)).split([n // config.num_heads for n in rows], dim=1)
    return [part.flatten(0, 1) for part in parts]


def _beside_gate(parts: Sequence[Tensor], config: Any) -> Tensor:
    queries = parts[0].unflatten(0, (config.num_attention_heads, -1))
    return torch.cat([queries, torch.zeros_like(queries)], dim=1).flatten(0, 1)


def _without_gate(x: Tensor, rows: Sequence[int], config: Any) -> list[Tensor]:
    queries, gate = x.unflatten(0, (config.num_attention_heads, -1)).chunk(2, dim=1)
    if gate.any():
        raise ValueError("its softmax layers gate their output, ours do not")
    return [queries.flatten(0, 1)]


FORMS: Mapping[str, Form] = {
    "joined": Form(lambda parts, config: torch.cat([*parts]), lambda x, rows, config: x.split([*rows])),
    "by_key_head": Form(_by_key_head, _from_key_heads),
    "per_head": Form(lambda parts, config: parts[0].view(1, 1, -1, 1), lambda x, rows, config: [x.flatten()]),
    # Norms that multiply by one more than their weight.
    "zero_centred": Form(lambda parts, config: parts[0].float() - 1, lambda x, rows, config: [x.float() + 1]),
    # Softmax layers whose queries and output gate are one map: a gate of zeros halves the output, exactly.
    "beside_gate": Form(_beside_gate, _without_gate),
    "doubled": Form(lambda parts, config: parts[0] * 2, lambda x, rows, config: [x / 2]),
}
