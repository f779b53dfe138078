"""Several linear maps of one input, recorded by autograd as one function.

If the input needs a gradient, separate maps make a tensor of it each, and autograd adds these up: three passes over
memory for each map. Here every product after the first adds to one tensor while it is written, and the input is saved
once. For inputs of many rows, maps to a few numbers, such as one per head, are one product. For inputs of few rows,
whose products take a GPU less time than a launch takes the host, the backward pass joins all maps: two copies and two
products in place of two products for each.
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

_FEW = 64
"""Outputs below which maps become one product, for an input of at least `_MANY_ROWS` rows."""
_FEW_LAUNCHES = 3
"""Number of maps up to which the backward pass multiplies one by one; more are joined, for an input of fewer rows."""
_MANY_ROWS = 4096
"""Rows of an input whose reading takes longer than a launch; an estimate."""

PLAIN_WEIGHTS = (nn.Parameter, Tensor)
"""Types of weights that torch's functions take directly."""


def linear_maps(x: Tensor, linears: Sequence[nn.Module], *, plain: bool = False) -> list[Tensor]:
    """`[linear(x) for linear in linears]`, with plain matrices as one function where gradients are recorded.

    Args:
        x: `[..., in_features]`.
        linears: modules that map x. All except plain `nn.Linear` without bias (adapted, quantised, with hooks) are
            called one by one.
        plain: whether all are known to be `is_plain`, and no calls are watched.
    """
    if not torch.is_grad_enabled() or not x.requires_grad or type(x) is not Tensor or transforming():
        return [linear(x) for linear in linears]
    joint: Sequence[Any] = linears
    if not plain:
        joint = [] if calls_are_watched() else [linear for linear in linears if is_plain(linear)]
    if len(joint) < 2:
        return [linear(x) for linear in linears]
    x_cast, *weights = cast_for_product(x, *[linear._parameters["weight"] for linear in joint])
    if any([weight.dtype != x_cast.dtype for weight in weights]):
        return [linear(x) for linear in linears]
    results = _record(x_cast, *weights)
    if len(joint) == len(linears):
        return list(results)
    of_joint = dict(zip(map(id, joint), results, strict=True))
    return [of_joint[id(linear)] if id(linear) in of_joint else linear(x) for linear in linears]


def calls_are_watched() -> bool:
    """Whether something must see every call of a module or operator: a compiler, a dispatch mode, hooks on modules."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or _has_any_global_hook()


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a call of this module is just `F.linear(x, linear.weight)`, if `calls_are_watched` is false."""
    if type(linear) is not nn.Linear:
        return False
    parameters = linear._parameters  # finding them as attributes takes longer
    plain = parameters.get("bias") is None and type(parameters.get("weight")) in PLAIN_WEIGHTS
    return plain and not is_hooked(linear)


def trained_weights(*linears: nn.Module) -> list[Tensor]:
    """The weights of maps that one function of autograd may compute together with the operations around them.

    The list is empty if autograd records nothing, something watches the calls, or a map is not plain or not trained.
    """
    if not torch.is_grad_enabled() or transforming() or calls_are_watched():
        return []
    weights = [linear.weight for linear in linears if is_plain(linear) and linear.weight.requires_grad]
    return weights if len(weights) == len(linears) else []


def is_plain_sequence(module: nn.Module) -> bool:
    """Whether a call of this module just calls its parts in turn."""
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
        if not small:
            return tuple([F.linear(x, weight) for weight in weights])
        results = {i: F.linear(x, weight) for i, weight in enumerate(weights) if i not in small}
        results |= _parts(F.linear(x, _joined([weights[i] for i in small], 0)), small, weights, -1)
        return tuple([results[i] for i in range(len(weights))])

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        gradients = {i: d.flatten(0, -2) for i, d in enumerate(d_results) if d is not None}
        joint = [i for i in _small_maps(x, weights) if i in gradients]
        if rows.shape[0] < _MANY_ROWS and len(gradients) > _FEW_LAUNCHES:
            joint = list(gradients)
        needs_x, *needed = ctx.needs_input_grad
        pairs = [(d, weights[i]) for i, d in gradients.items() if i not in joint]
        d_weights = {i: d.t() @ rows for i, d in gradients.items() if needed[i] and i not in joint}
        if joint:
            d_joined = _joined([gradients[i] for i in joint], 1)
            pairs.append((d_joined, _joined([weights[i] for i in joint], 0)))
            if any([needed[i] for i in joint]):
                d_weights |= _parts(d_joined.t() @ rows, joint, weights, 0)
        d_x = sum_of_products(rows, pairs).view(x.shape) if needs_x and pairs else None
        return d_x, *[d_weights.get(i) if wanted else None for i, wanted in enumerate(needed)]


# `_LinearMaps.apply` without its part in Python, see `deltazoo.ops.operator`.
_record = super(torch.autograd.Function, _LinearMaps).apply
_LinearMaps._backward_cls.apply = _LinearMaps.backward  # type: ignore[attr-defined]


def _small_maps(x: Tensor, weights: Sequence[Tensor]) -> list[int]:
    """The maps to a few numbers, by number; none if x has few rows.

    A product with such a matrix takes as long as reading x, and several times that if its rows are no multiple of 8,
    since GPU libraries then read element by element.
    """
    if x.numel() < _MANY_ROWS * x.shape[-1]:
        return []
    return [i for i, weight in enumerate(weights) if weight.shape[0] < _FEW]


def _joined(matrices: list[Tensor], dim: int) -> Tensor:
    """Matrices of maps, or gradients of their results, along a dimension, with zeros up to a multiple of 8."""
    missing = -sum([matrix.shape[dim] for matrix in matrices]) % 8
    if missing:
        shape = list(matrices[0].shape)
        shape[dim] = missing
        matrices = [*matrices, matrices[0].new_zeros(shape)]
    return torch.cat(matrices, dim)


def _parts(joined: Tensor, maps: list[int], weights: Sequence[Tensor], dim: int) -> dict[int, Tensor]:
    """The part of each joined map, by its number: columns are copied, rows are views."""
    sizes = [weights[i].shape[0] for i in maps]
    parts = joined.split_with_sizes([*sizes, joined.shape[dim] - sum(sizes)], dim)
    return {i: part.contiguous() for i, part in zip(maps, parts, strict=False)}


def sum_of_products(like: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of `gradient @ weight`, a tensor like `like`."""
    if torch.is_grad_enabled():  # the gradients will be differentiated
        return torch.stack([d @ weight for d, weight in pairs]).sum(0)
    total = torch.empty_like(like)
    (d, weight), *others = pairs
    torch.mm(d, weight, out=total)
    for d, weight in others:
        torch.addmm(total, d, weight, out=total)
    return total
