"""Whether the backward pass of the operator scans again for what the forward pass could have kept.

On a GPU that is the corrections and the states that enter the chunks: with heads of 128, three quarters of what a call
keeps besides its inputs. With a decay per channel, or where one kernel makes the whole forward pass in fast precision,
it is everything.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["scanning_again", "scans_again"]

_ACTIVE = ContextVar("scanning_again", default=False)


@contextmanager
def scanning_again() -> Iterator[None]:
    """Inside, in this thread, recorded calls do not keep that; gradients are the same, up to rounding."""
    token = _ACTIVE.set(True)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def scans_again() -> bool:
    """Whether the caller is inside `scanning_again`. Compiled calls never are."""
    return not torch.compiler.is_compiling() and _ACTIVE.get()
