"""Clipping of gradients that lie on several device meshes."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, also where some parameters are divided and others are whole.

    Tensor parallelism leaves norms whole on every rank, as plain tensors, and torch's function takes no mixture.

    Args:
        parameters: all of the model's; plain ones have the same gradients on all ranks, which needs transformers 5.17
            under tensor parallelism.
        max_norm: gradients of a larger norm are scaled to this one.

    Returns:
        Norm of all gradients before, `[]`, the same on all ranks.
    """
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.stack(whole).norm() if whole else torch.tensor(0.0)
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
