"""Plain eager calls without torch's dispatcher, which costs the host more than the launches of a kernel or two."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

__all__ = ["call", "eager_function"]

_PLAIN = (Tensor, torch.nn.Parameter)


def call(
    operator: Callable[..., Any],
    function: type[torch.autograd.Function],
    forward: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    """Call an operator of `torch.library`, or, where nobody wants to see it, what it does.

    Args:
        operator: with its autograd formula.
        function: the same as an autograd function.
        forward: the same without gradients.
        arguments: of each of them.
    """
    if _watched():
        return operator(*arguments)
    recording = False
    for x in arguments:
        if type(x) in _PLAIN:
            recording = recording or x.requires_grad
        elif isinstance(x, Tensor):  # a subclass, which may want to see the operator
            return operator(*arguments)
    if recording and torch.is_grad_enabled():
        return function.apply(*arguments)
    return forward(*arguments)


def eager_function(
    forward: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    *,
    shown: Callable[[Any], Any] = lambda results: results,
) -> type[torch.autograd.Function]:
    """What `torch.library` makes of an operator's formulas, without its dispatcher.

    Args:
        forward: arguments -> results.
        setup_context: `(ctx, arguments, results)`, keeps what the backward pass needs.
        backward: `(ctx, *gradients)` -> a gradient per argument.
        shown: which results the caller gets; the others are only kept.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            results = forward(*arguments)
            setup_context(ctx, arguments, results)
            return shown(results)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx, *gradients)

    return Eager


def _watched() -> bool:
    """Whether a compiler, a dispatch mode or a function transform is to see the operator."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active()
