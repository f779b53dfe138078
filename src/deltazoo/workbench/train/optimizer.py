"""Optimizer groups: parameters with and without weight decay."""

from typing import Any

from torch import nn

from deltazoo.layers import parameters_without_decay


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: parameters that decay and parameters that do not; frozen ones are in neither.

    Matrices decay, except those that their layer or a mark (``_no_weight_decay``) exempts. Parameters with one
    dimension are gate parameters, norm weights or biases, and do not decay.
    """
    spared = parameters_without_decay(model)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[parameter.ndim > 1 and name not in spared].append(parameter)
    return [{"params": groups[True], "weight_decay": weight_decay}, {"params": groups[False], "weight_decay": 0.0}]
