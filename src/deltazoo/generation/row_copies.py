"""Copying the states of single rows in and out of a cache whose layers all keep states of one size."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from deltazoo.generation.cache import DeltaRuleCacheLayer
from deltazoo.generation.layer_contents import kind_of, tensors_of
from deltazoo.generation.states import Snapshot

__all__ = ["RowCopies"]


class RowCopies:
    """What `snapshot` and `restore` do for single rows, of all layers with one launch per dtype.

    Args:
        cache: static, of delta-rule layers that hold something, whose tensors stay where they are.
    """

    def __init__(self, cache: Cache) -> None:
        self._kinds = tuple(map(kind_of, cache.layers))
        held = [tensors_of(layer) for layer in cache.layers]
        rows = min(len(x) for tensors in held for x in tensors.values())
        self._rows = [
            tuple({name: x[row : row + 1] for name, x in tensors.items()} for tensors in held) for row in range(rows)
        ]
        self._device = _tensors(self._rows[0])[0].device
        self._sizes: dict[torch.dtype, list[int]] = {}
        for x in _tensors(self._rows[0]):
            self._sizes.setdefault(x.dtype, []).append(x.numel())

    @staticmethod
    def serve(cache: Cache) -> bool:
        """Whether a cache is of the kind that this is for."""
        return all(isinstance(layer, DeltaRuleCacheLayer) and layer.static for layer in cache.layers)

    def take(self, row: int, num_tokens: int) -> Snapshot:
        """A copy of a row, which has had `num_tokens` tokens."""
        # One block of memory per dtype, as asking for one per layer takes longer than copying.
        blocks = {
            dtype: iter(torch.empty(sum(sizes), dtype=dtype, device=self._device).split(sizes))
            for dtype, sizes in self._sizes.items()
        }
        layers = tuple(
            {name: next(blocks[x.dtype]).view(x.shape) for name, x in tensors.items()} for tensors in self._rows[row]
        )
        _copy(zip(_tensors(layers), _tensors(self._rows[row]), strict=True))
        return Snapshot(self._kinds, layers, num_tokens)

    def put(self, row: int, saved: Snapshot) -> None:
        """Replace a row by a snapshot of one row."""
        _copy(zip(_tensors(self._rows[row]), _tensors(saved.layers), strict=True))

    def move(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Replace rows by others; none is both a source and a target."""
        pairs = zip(sources, targets, strict=True)
        _copy(pair for x, y in pairs for pair in zip(_tensors(self._rows[y]), _tensors(self._rows[x]), strict=True))


def _tensors(layers: Iterable[Any]) -> list[Tensor]:
    return [x for tensors in layers for x in tensors.values()]


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair to the first; tensors of one dtype together, as one kernel takes them."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = by_dtype.setdefault(target.dtype, ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)
