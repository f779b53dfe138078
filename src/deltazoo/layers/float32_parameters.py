"""Parameters that keep float32 when the rest of a model is cast to half precision."""

from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

__all__ = ["Float32Parameters", "UndecayedName"]


class UndecayedName(str):
    """A parameter's name that transformers' Trainer takes for a bias, and everyone else for what it is.

    Trainer chooses what to decay by name: everything in which it finds no "bias" and no "norm". That spares `dt_bias`
    but not `A_log`, a name that checkpoints fix. It compares in lower case, so that is where this name says what kind
    of parameter it belongs to. As the key under which a module registers its parameter it outlasts loading, casting,
    copying and sharding, none of which make new keys.
    """

    __slots__ = ()

    def lower(self) -> str:
        """The name in lower case, marked as a bias."""
        return f"{super().lower()}_bias"


class Float32Parameters(nn.Module):
    """A module some of whose own parameters are never narrower than float32, and never decayed.

    Decay gates need it: `A_log` in bfloat16 puts the decay rate off by up to 1 %, and weight decay on it changes how
    long a head remembers. `to`, `half`, `bfloat16` and the like move these parameters but do not narrow them; widening
    to float64 works as usual.
    """

    float32_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of those parameters; a name the module has no parameter for is skipped."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in `nn.Module`, and those of `float32_parameters` are widened and marked."""
        if name not in self.float32_parameters:
            super().register_parameter(name, param)
            return
        if param is not None and torch.finfo(param.dtype).bits < 32:
            param = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        super().register_parameter(UndecayedName(name), param)
        self.mark_float32_parameters()

    def mark_float32_parameters(self) -> None:
        """Set `_no_weight_decay` on them, where optimisers of other libraries look for it."""
        for parameter in self.kept_in_float32():
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def kept_in_float32(self) -> list[nn.Parameter]:
        """Those of `float32_parameters` that the module has."""
        return [p for name in self.float32_parameters if (p := self._parameters.get(name)) is not None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        parameters = self.kept_in_float32()
        kept = [tensor for p in parameters for tensor in (p, p.grad) if tensor is not None]

        def move_without_narrowing(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if any(tensor is k for k in kept) and torch.finfo(moved.dtype).bits < 32:
                return tensor.to(moved.device, torch.float32)
            return moved

        super()._apply(move_without_narrowing, recurse)
        self.mark_float32_parameters()  # leaving the meta device makes new parameters, without the mark
        return self
