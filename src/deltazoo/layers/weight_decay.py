"""Which parameters weight decay leaves alone. One function decides for training, Trainer and swapped models.

Pulling the decay gates `A_log` and `dt_bias` towards zero changes how long a head remembers. A layer declares such
parameters once, in `float32_parameters`. Norm weights, biases and everything else with one dimension do not decay
either.
"""

from typing import Any

from torch import nn

_DECAY_GATES = ("A_log", "dt_bias")
"""Their names in transformers' models, where `A_log` may have several dimensions."""

__all__ = ["NameForTrainer", "mark_undecayed", "parameter_groups", "parameters_without_decay"]


def parameters_without_decay(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay must leave alone.

    They are found by what modules declare and by shape, not by marks alone, which loading or sharding may lose. Ask
    before anything flattens the parameters.
    """
    names = set()
    for prefix, module in model.named_modules():
        declared = getattr(module, "float32_parameters", ())
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            one_dimension = parameter.ndim <= 1 or name == "bias"
            marked = getattr(parameter, "_no_weight_decay", False)
            if name in declared or name in _DECAY_GATES or marked or is_norm or one_dimension:
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: parameters that decay, and parameters that do not. Frozen ones are in neither.

    If parameters are on several device meshes, or some on none, as under tensor parallelism, each of the two is divided
    into several groups, since the fused and foreach forms of optimizers take no mixture.

    Args:
        model: with or without delta-rule layers.
        weight_decay: of the first group.
    """
    without = parameters_without_decay(model)
    by_mesh: dict[bool, dict[Any, list[nn.Parameter]]] = {True: {}, False: {}}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mesh = getattr(parameter, "device_mesh", None)
            by_mesh[name not in without].setdefault(mesh, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for decays, meshes in by_mesh.items()
        for parameters in (meshes.values() or [[]])
    ]


def mark_undecayed(parameter: nn.Parameter) -> None:
    """Set `_no_weight_decay`, where optimizers of other libraries look for it."""
    parameter._no_weight_decay = True  # type: ignore[attr-defined]


class NameForTrainer(str):
    """The key under which a module registers a parameter that transformers' Trainer must not decay.

    Trainer asks no model. It decays every parameter in whose name, in lower case, it finds no "bias" and no "norm".
    That spares `dt_bias` but not `A_log`, a name that checkpoints fix. So the key is the usual name, except in lower
    case, where it ends in "bias". Keys outlast loading, casting, copying and sharding, which make no new ones.
    """

    __slots__ = ()

    def lower(self) -> str:
        """The name in lower case, with the ending that Trainer looks for."""
        return f"{super().lower()}_bias"
