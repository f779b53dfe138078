"""Parameters and buffers that keep float32 when the rest of a model is cast to half precision."""

from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from deltazoo.layers.weight_decay import NameForTrainer, mark_undecayed

__all__ = ["Float32Parameters"]


class Float32Parameters(nn.Module):
    """A module that declares parameters and buffers of its own which are never narrower than float32.

    Decay gates need it: `A_log` in bfloat16 puts the decay rate off by up to 1 %. So do rotary frequencies, which
    multiply positions. `to`, `half`, `bfloat16` and the like move these tensors but do not narrow them; widening to
    float64 works as usual. The parameters are never decayed either.
    """

    float32_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of those parameters; a name the module has no parameter for is skipped."""
    float32_buffers: ClassVar[tuple[str, ...]] = ()
    """Names of those buffers; a name the module has no buffer for is skipped."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in `nn.Module`; the declared parameters are widened and marked."""
        if name not in self.float32_parameters:
            super().register_parameter(name, param)
            return
        if param is not None and torch.finfo(param.dtype).bits < 32:
            param = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        super().register_parameter(NameForTrainer(name), param)
        if param is not None:
            mark_undecayed(param)

    def kept_in_float32(self) -> list[nn.Parameter]:
        """Those of `float32_parameters` that the module has."""
        return [p for name in self.float32_parameters if (p := self._parameters.get(name)) is not None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        buffers = [getattr(self, name, None) for name in self.float32_buffers]
        gradients = [parameter.grad for parameter in self.kept_in_float32()]
        kept = [tensor for tensor in (*self.kept_in_float32(), *gradients, *buffers) if tensor is not None]

        def move_without_narrowing(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if any(tensor is k for k in kept) and torch.finfo(moved.dtype).bits < 32:
                return tensor.to(moved.device, torch.float32)
            return moved

        super()._apply(move_without_narrowing, recurse)
        for parameter in self.kept_in_float32():  # leaving the meta device makes new parameters, without the mark
            mark_undecayed(parameter)
        return self
