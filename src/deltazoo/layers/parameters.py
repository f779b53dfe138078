"""Parameters that keep float32 in a model of half precision, and those that weight decay leaves alone.

Weight decay on the decay gates `A_log` and `dt_bias` would change how long a head remembers. A layer declares such
parameters once, in `float32_parameters`. Norm weights, biases and other parameters with one dimension do not decay
either. Our training, Trainer and swapped models all ask `parameters_without_decay`.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

_DECAY_GATES = ("A_log", "dt_bias")
"""Names of decay gates in transformers' models, where `A_log` may have several dimensions."""


def parameters_without_decay(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay must leave alone.

    They are found by the declarations of modules and by shape, since loading or sharding may lose a parameter's marks.
    Call this before anything flattens the parameters.
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
    """Two groups for an optimizer: parameters that decay, and parameters that do not. Frozen parameters are in neither.

    Args:
        model: with or without delta-rule layers.
        weight_decay: weight decay of the first group.
    """
    without = parameters_without_decay(model)
    by_decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            by_decay[name not in without].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for decays, parameters in by_decay.items()
    ]


def mark_undecayed(parameter: nn.Parameter) -> None:
    """Set `_no_weight_decay`, where optimizers of other libraries look for it."""
    parameter._no_weight_decay = True  # type: ignore[attr-defined]


class NameForTrainer(str):
    """The key under which a module registers a parameter that transformers' Trainer must not decay.

    Trainer decays every parameter whose name in lower case has neither "bias" nor "norm" in it. That spares `dt_bias`
    but not `A_log`, a name that checkpoints fix. So the key equals the usual name, but its lower case ends in "bias".
    Loading, casting, copying and sharding keep the key, since they make no new ones.
    """

    __slots__ = ()

    def lower(self) -> str:
        """The name in lower case, with the ending that Trainer looks for."""
        return f"{super().lower()}_bias"


class Float32Parameters(nn.Module):
    """A module that declares parameters and buffers of its own which are never narrower than float32.

    A decay gate `A_log` in bfloat16 puts the decay rate off by up to 1 %, and rotary frequencies multiply positions.
    `to`, `half`, `bfloat16` and the like move these tensors but do not narrow them; widening to float64 works as usual.
    Weight decay leaves the parameters alone.
    """

    float32_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters; a name for which the module has none is skipped."""
    float32_buffers: ClassVar[tuple[str, ...]] = ()
    """Names of the buffers; a name for which the module has none is skipped."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter as `nn.Module` does; declared ones are widened to float32 and marked."""
        if name not in self.float32_parameters:
            super().register_parameter(name, param)
            return
        if param is not None and torch.finfo(param.dtype).bits < 32:
            param = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        super().register_parameter(NameForTrainer(name), param)
        if param is not None:
            mark_undecayed(param)

    def kept_in_float32(self) -> list[nn.Parameter]:
        """The parameters in `float32_parameters` that the module has."""
        return [p for name in self.float32_parameters if (p := self._parameters.get(name)) is not None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        parameters, buffers = self.kept_in_float32(), [getattr(self, name, None) for name in self.float32_buffers]
        kept = [x for x in (*parameters, *(p.grad for p in parameters), *buffers) if x is not None]

        def move_without_narrowing(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if any(tensor is x for x in kept) and torch.finfo(moved.dtype).bits < 32:
                return tensor.to(moved.device, torch.float32)
            return moved

        super()._apply(move_without_narrowing, recurse)
        for parameter in self.kept_in_float32():  # leaving the meta device makes new parameters, without the mark
            mark_undecayed(parameter)
        return self
