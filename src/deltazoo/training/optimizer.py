"""Which parameters weight decay acts on."""

from typing import Any

from torch import nn


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay acts on a parameter: on matrices, and on no gate parameter, norm weight or bias.

    Parameters marked ``_no_weight_decay`` (``A_log``, ``dt_bias``) never decay, by mark or by name, since wrapping a
    model may lose marks. Everything else with one dimension is a norm weight or a bias.
    """
    gate = name.rsplit(".", 1)[-1] in ("A_log", "dt_bias")
    return parameter.ndim > 1 and not gate and not getattr(parameter, "_no_weight_decay", False)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: parameters that decay and parameters that do not; frozen ones are in neither."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[decays(name, parameter)].append(parameter)
    return [{"params": groups[True], "weight_decay": weight_decay}, {"params": groups[False], "weight_decay": 0.0}]
