"""Several linear maps of one input, recorded by autograd as one function.

Where the input needs a gradient, each map of its own makes a tensor of it, which autograd then adds up, three passes
over memory for each. Here every product after the first adds to the same tensor as it is written, and the input is
saved once. For inputs of many rows, maps to a few numbers, such as one per head, are one product. For inputs of few
rows, whose products take a GPU less time than a launch takes the host, the backward pass joins all maps: two copies and
two products in place of two products for each.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from deltazoo.ops.autograd_modes import transforming
from deltazoo.ops.dtypes import cast_for_product

__all__ = ["PLAIN_WEIGHTS", "called_as_is", "is_hooked", "is_plain_sequence", "linear_maps", "takes_weight"]


_FEW = 64
"""Maps to fewer numbers are one product, for an input of at least `_MANY_ROWS` rows."""
_FEW_LAUNCHES = 3
"""Maps of which the backward pass makes products one by one; more are joined, for an input of fewer rows."""
_MANY_ROWS = 4096
"""A guess at where reading the input takes longer than a launch."""

PLAIN_WEIGHTS = (nn.Parameter, Tensor)
"""Types of a weight that torch's functions take as it is: a parameter, or under tensor parallelism this rank's part."""


def linear_maps(x: Tensor, linears: Sequence[nn.Module], *, plain: bool = False) -> list[Tensor]:
    """`[linear(x) for linear in linears]`, those that are plain matrices as one function where gradients are recorded.

    Args:
        x: `[..., in_features]`.
        linears: modules that map x. Any but a plain `nn.Linear` without bias (adapted, quantised, with hooks) are
            called one by one.
        plain: all are known to be `called_as_is`.
    """
    if not torch.is_grad_enabled() or not x.requires_grad:
        return [linear(x) for linear in linears]
    joint: Sequence[Any] = linears if plain else [linear for linear in linears if called_as_is(linear)]
    if len(joint) < 2 or transforming() or type(x) is not Tensor:
        return [linear(x) for linear in linears]
    x_cast, *weights = cast_for_product(x, *[linear.weight for linear in joint])
    if {weight.dtype for weight in weights} != {x_cast.dtype}:
        return [linear(x) for linear in linears]
    results = dict(zip(map(id, joint), _LinearMaps.apply(x_cast, *weights), strict=True))
    return [results[id(linear)] if id(linear) in results else linear(x) for linear in linears]


def called_as_is(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling this module is no more than `F.linear(x, linear.weight)`, and nothing watches the call."""
    if type(linear) is not nn.Linear or linear.bias is not None or type(linear.weight) not in PLAIN_WEIGHTS:
        return False
    watched = torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or _has_any_global_hook()
    return not (watched or is_hooked(linear))


def takes_weight(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether one function of autograd may compute the map and what stands before it: in training, as it is called."""
    recording = torch.is_grad_enabled() and not transforming()
    return recording and called_as_is(linear) and linear.weight.requires_grad


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


class _LinearMaps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        small = _small_maps(x, weights)
        results = {i: F.linear(x, weight) for i, weight in enumerate(weights) if i not in small}
        if small:
            results |= _parts(F.linear(x, _joined([weights[i] for i in small], 0)), small, weights, -1)
        return tuple([results[i] for i in range(len(weights))])

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = x.flatten(0, -2)
        gradients = {i: d.flatten(0, -2) for i, d in enumerate(d_results) if d is not None}
        joint = [i for i in _small_maps(x, weights) if i in gradients]
        if len(rows) < _MANY_ROWS and len(gradients) > _FEW_LAUNCHES:
            joint = list(gradients)
        trained = [i for i in gradients if ctx.needs_input_grad[1 + i]]
        pairs = [(d, weights[i]) for i, d in gradients.items() if i not in joint]
        d_weights = {i: gradients[i].t() @ rows for i in trained if i not in joint}
        if joint:
            d_joined = _joined([gradients[i] for i in joint], 1)
            pairs.append((d_joined, _joined([weights[i] for i in joint], 0)))
            if any(i in trained for i in joint):
                d_weights |= _parts(d_joined.t() @ rows, joint, weights, 0)
        d_x = _sum_of_products(rows, pairs).view(x.shape) if ctx.needs_input_grad[0] and pairs else None
        return d_x, *[d_weights.get(i) if i in trained else None for i in range(len(weights))]


def _small_maps(x: Tensor, weights: Sequence[Tensor]) -> list[int]:
    """The maps to a few numbers, by number; none if x has few rows.

    A product with such a matrix takes as long as reading x, and several times that if its rows are no multiple of 8,
    since GPU libraries then read element by element.
    """
    if x.numel() < _MANY_ROWS * x.shape[-1]:
        return []
    return [i for i, weight in enumerate(weights) if len(weight) < _FEW]


def _joined(matrices: list[Tensor], dim: int) -> Tensor:
    """Matrices of maps, or gradients of their results, along a dimension, with zeros up to a multiple of 8."""
    shape = list(matrices[0].shape)
    shape[dim] = -sum(matrix.shape[dim] for matrix in matrices) % 8
    return torch.cat([*matrices, matrices[0].new_zeros(shape)], dim)


def _parts(joined: Tensor, maps: list[int], weights: Sequence[Tensor], dim: int) -> dict[int, Tensor]:
    """The part of each of the joined maps: along columns in memory of its own, rows as they lie."""
    sizes = [len(weights[i]) for i in maps]
    parts = joined.narrow(dim, 0, sum(sizes)).split(sizes, dim)
    return {i: part.contiguous() for i, part in zip(maps, parts, strict=True)}


def _sum_of_products(like: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of `gradient @ weight`."""
    if torch.is_grad_enabled():  # the gradients are to be differentiated
        return torch.stack([d @ weight for d, weight in pairs]).sum(0)
    total = torch.empty_like(like)
    (d, weight), *others = pairs
    torch.mm(d, weight, out=total)
    for d, weight in others:
        torch.addmm(total, d, weight, out=total)
    return total
