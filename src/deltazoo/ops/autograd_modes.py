"""Modes of autograd that change how calls compute: gradients, transforms, second derivatives, a second scan."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_SCANS_AGAIN = ContextVar("scans_again", default=False)


def records_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def transforming() -> bool:
    """Whether a transform of torch.func (grad, vjp, jvp, vmap, ...) or a level of forward mode is active.

    Calls then use operations of torch alone. For operators of `torch.library`, forward mode silently drops the
    tangents, and torch.func cannot transform those with a backward formula.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# The compiler enters the transforms of the program that it traces, so the value while tracing is right.
transforming._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_transforms(what: str, instead: str) -> None:
    """Raise NotImplementedError if a transform is active.

    Args:
        what: the operator or kernel that supports none, for example "the triton backend".
        instead: what the caller should do, for example "use backend='chunkwise'".
    """
    if transforming():
        raise NotImplementedError(f"{what} has no forward mode and no torch.func transforms: {instead}")


def refuse_second_derivative(what: str, instead: str) -> None:
    """Raise NotImplementedError in a backward pass that is itself to be differentiated (`create_graph=True`)."""
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{what} has no second derivative (create_graph=True): {instead}")


@contextmanager
def scanning_again() -> Iterator[None]:
    """A context, in this thread, in which backward passes compute again what scans otherwise leave for them, on a GPU.

    These are the corrections and the states that enter the chunks: with heads of 128, three quarters of the memory that
    a call keeps besides its inputs. With a decay per channel, or if one kernel computes the whole forward pass in fast
    precision, they are all of it. Gradients are the same, up to rounding.
    """
    token = _SCANS_AGAIN.set(True)
    try:
        yield
    finally:
        _SCANS_AGAIN.reset(token)


def scans_again() -> bool:
    """Whether the caller is inside `scanning_again`. Compiled calls never are."""
    return not torch.compiler.is_compiling() and _SCANS_AGAIN.get()
