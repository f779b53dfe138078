"""Several linear maps of one input, recorded by autograd as one function.

Where the input needs a gradient, each map of its own makes a tensor of it, which autograd then adds up, three passes
over memory for each. Here every product after the first adds to the same tensor as it is written, and the input is
saved once. Maps to a few numbers, such as one per head, are one product.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from deltazoo.ops.transforms import transforming

__all__ = ["PLAIN_WEIGHTS", "called_as_is", "cast_for_product", "is_hooked", "is_plain_sequence", "linear_maps"]


_FEW, _MANY_ROWS = 64, 4096

PLAIN_WEIGHTS = (nn.Parameter, Tensor)
"""Types of a weight that torch's functions take as it is: a parameter, or under tensor parallelism this rank's part."""


def linear_maps(x: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """`[linear(x) for linear in linears]`, those that are plain matrices as one function where that is faster.

    Args:
        x: `[..., in_features]`.
        linears: modules that map x. Any but a plain `nn.Linear` without bias (adapted, quantised, with hooks) are
            called one by one.
    """
    records = torch.is_grad_enabled()
    gains = x.requires_grad if records else _many_rows(x)
    joint = [linear for linear in linears if called_as_is(linear)] if gains else []
    if len(joint) < 2 or transforming() or type(x) is not Tensor:
        return [linear(x) for linear in linears]
    x_cast, *weights = cast_for_product(x, *(linear.weight for linear in joint))
    if any(weight.dtype != x_cast.dtype for weight in weights):
        return [linear(x) for linear in linears]
    found = (_LinearMaps.apply if records else _products)(x_cast, *weights)
    results = dict(zip(map(id, joint), found, strict=True))
    return [results[id(linear)] if id(linear) in results else linear(x) for linear in linears]


def called_as_is(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling this module is no more than `F.linear(x, linear.weight)`, and nothing watches the call."""
    if type(linear) is not nn.Linear or linear.bias is not None or type(linear.weight) not in PLAIN_WEIGHTS:
        return False
    watched = torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or _has_any_global_hook()
    return not (watched or is_hooked(linear))


def is_plain_sequence(module: nn.Module) -> bool:
    """Whether calling this module is no more than calling its parts in turn."""
    return type(module) is nn.Sequential and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether something watches the calls of this module, or has replaced its forward pass."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )


def cast_for_product(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype in which autocast, if it is on, would multiply them."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):  # none on "meta"
        return tensors
    if any(x.dtype == torch.float64 for x in tensors):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple([x.to(dtype) for x in tensors])


class _LinearMaps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        return _products(x, *weights)

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = x.flatten(0, -2)
        gradients = {i: d.flatten(0, -2) for i, d in enumerate(d_results) if d is not None}
        groups = [there for group in _groups(x, weights) if (there := [i for i in group if i in gradients])]
        fill = _many_rows(x)
        d_joined = [_joined([gradients[i] for i in group], 1, fill) for group in groups]
        d_x, d_weights = None, dict[int, Tensor]()
        if ctx.needs_input_grad[0] and groups:
            joined = [_joined([weights[i] for i in group], 0, fill) for group in groups]
            d_x = _sum_of_products(rows, d_joined, joined)
        for group, d in zip(groups, d_joined, strict=True):
            if any(ctx.needs_input_grad[1 + i] for i in group):
                d_weights.update(_parts(d.t() @ rows, group, weights, dim=0))
        wanted = [d_weights.get(i) if ctx.needs_input_grad[1 + i] else None for i in range(len(weights))]
        return None if d_x is None else d_x.view(x.shape), *wanted


def _products(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    results: dict[int, Tensor] = {}
    for group in _groups(x, weights):
        result = F.linear(x, _joined([weights[i] for i in group], 0, _many_rows(x)))
        results.update(_parts(result, group, weights, dim=-1))
    return tuple([results[i] for i in range(len(weights))])


def _many_rows(x: Tensor) -> bool:
    return x.numel() >= _MANY_ROWS * x.shape[-1]


def _groups(x: Tensor, weights: Sequence[Tensor]) -> list[list[int]]:
    """The maps by number: for an input of many rows those to a few numbers in one product, all others each in its own.

    Such a product takes as long as its input is read, and several times as long if the numbers are no multiple of 8:
    GPU libraries then read single elements.
    """
    few = [i for i, weight in enumerate(weights) if len(weight) < _FEW] if _many_rows(x) else []
    return [[i] for i in range(len(weights)) if i not in few] + [few] * bool(few)


def _joined(matrices: Sequence[Tensor], dim: int, fill: bool) -> Tensor:
    """The matrices of a group along one dimension; `fill` adds zeros if the group is one of maps to a few numbers."""
    first, size = matrices[0], sum(matrix.shape[dim] for matrix in matrices)
    missing = -size % 8 if fill and first.shape[dim] < _FEW else 0
    if missing:
        shape = (missing, first.shape[1]) if dim == 0 else (first.shape[0], missing)
        matrices = [*matrices, first.new_zeros(shape)]
    return first if len(matrices) == 1 else torch.cat(list(matrices), dim)


def _parts(joined: Tensor, group: list[int], weights: Sequence[Tensor], dim: int) -> dict[int, Tensor]:
    """What belongs to each map of a group, by number."""
    sizes = [len(weights[i]) for i in group]
    parts = joined.narrow(dim, 0, sum(sizes)).split(sizes, dim)
    return {i: part.contiguous() for i, part in zip(group, parts, strict=True)}


def _sum_of_products(like: Tensor, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of `gradient @ weight`."""
    if torch.is_grad_enabled():  # the gradients are to be differentiated
        return torch.stack([d @ weight for d, weight in zip(gradients, weights, strict=True)]).sum(0)
    total = torch.empty_like(like)
    torch.mm(gradients[0], weights[0], out=total)
    for d, weight in zip(gradients[1:], weights[1:], strict=True):
        torch.addmm(total, d, weight, out=total)
    return total
