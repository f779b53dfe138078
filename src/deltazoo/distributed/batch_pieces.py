"""A rank's tokens of a batch, for models under context parallelism."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from deltazoo.ops.fused.linear_cross_entropy import IGNORED

__all__ = ["local_batch", "piece_of_batch"]

_GRID = 64
"""Pieces begin at multiples of this many tokens where the batch is long enough: a chunk of the operator."""
_PER_TOKEN = ("input_ids", "position_ids", "labels", "shift_labels", "attention_mask")


def local_batch(batch: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """This rank's contiguous piece of a batch that all ranks of a mesh hold.

    Labels are shifted before the cut, so that the last token of a piece predicts the first of the next.

    Args:
        batch: `input_ids`, `position_ids`, `labels`, `shift_labels`, `attention_mask` `[B, T]`, whichever are there,
            are cut; everything else, such as global `cu_seqlens`, stays as it is.
        mesh: of one dimension, such as `mesh["cp"]`.

    Raises:
        ValueError: fewer tokens than ranks.
    """
    return piece_of_batch(batch, mesh.get_local_rank(), mesh.size())


def piece_of_batch(batch: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """`local_batch` of a given rank.

    Args:
        batch: as there.
        rank: the number of the piece.
        ranks: the number of pieces.

    Raises:
        ValueError: fewer tokens than ranks.
    """
    local = dict(batch)
    if "labels" in local and "shift_labels" not in local:
        local["shift_labels"] = F.pad(local["labels"][:, 1:], (0, 1), value=IGNORED)
    begin, end = piece_bounds(local["input_ids"].shape[1], rank, ranks)
    return {name: value[:, begin:end] if name in _PER_TOKEN else value for name, value in local.items()}


def piece_bounds(tokens: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where a rank's piece of `tokens` tokens begins and ends; pieces differ by at most one grid cell.

    Raises:
        ValueError: fewer tokens than ranks.
    """
    if tokens < ranks:
        raise ValueError(f"{tokens} tokens cannot be divided among {ranks} ranks: every rank needs at least one")
    grid = _GRID if tokens >= _GRID * ranks else 1
    cells = -(-tokens // grid)
    return tuple(min(cells * r // ranks * grid, tokens) for r in (rank, rank + 1))  # type: ignore[return-value]
