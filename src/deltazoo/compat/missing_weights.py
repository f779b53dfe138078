"""Refuse a checkpoint that lacks weights, which transformers would draw at random."""

from collections.abc import Collection
from pathlib import Path

__all__ = ["refuse_missing_weights"]

_SHOWN = 5


def refuse_missing_weights(missing: Collection[str], path: str | Path) -> None:
    """Raise ValueError if weights are missing.

    Args:
        missing: `missing_keys` of transformers' loading info, which leaves out tied weights.
        path: of the checkpoint.
    """
    if missing:
        names = sorted(missing)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ValueError(f"{path} lacks weights of its model: {', '.join(names[:_SHOWN])}{more}")
