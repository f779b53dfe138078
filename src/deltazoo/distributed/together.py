"""Calls of a mixer or an MLP under tensor parallelism in which ranks exchange once in each pass.

The styles of transformers act on every linear map alone: each sums the gradient of its input over the ranks, and all of
its tensors are DTensors, whose operations take the host many times as long as those of plain ones. Here a whole module
gets this rank's part of its parameters as plain tensors. It computes a summand of its output, and in the backward pass
a summand of the gradient of its input, and each is summed once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from deltazoo.layers import RMSNorm, ShortConvolution
from deltazoo.layers.norm import GatedRMSNorm

__all__ = ["CallTogether"]

_KNOWN_PARTS = (nn.Linear, ShortConvolution, nn.Sequential, RMSNorm, GatedRMSNorm)


class CallTogether:
    """The forward pass of a module whose parts have tensor-parallel styles: all of them together where that can be.

    It cannot where parts are of another kind than they had when the model was made or than this knows (adapters,
    quantised maps), where something else has replaced their forward passes, and in compiled code. Then the parts' own
    styles act.

    Args:
        module: whose `forward` this replaces.
        mesh: the ranks.
        forward: of the module without styles; the one with them is what the module has now.
        gathered: linear maps that each rank computes whole; their weights are divided, and put together for the call.
        prepare: called before every forward pass.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Any,
        forward: Callable[..., Any],
        *,
        gathered: Sequence[nn.Module] = (),
        prepare: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.module, self.mesh, self.forward, self.gathered, self.prepare = module, mesh, forward, gathered, prepare
        self.separately = module.forward
        modules = dict(module.named_modules())
        self.parts = [
            (modules[name.rpartition(".")[0]], name.rpartition(".")[2], part)
            for name, part in modules.items()
            if part is not module and any(True for _ in part.parameters())
        ]
        self.known = all(type(part) in _KNOWN_PARTS for _, _, part in self.parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, the same on all ranks."""
        for prepare in self.prepare:
            prepare()
        if not args or not self._can():
            return self.separately(*args, **kwargs)
        group = self.mesh.get_group()
        x, *others = args
        if torch.is_grad_enabled() and x.requires_grad:
            x = _SumGradient.apply(x, group)
        with self._parts_of_parameters():
            result = self.forward(x, *others, **kwargs)
        if isinstance(result, tuple):
            return (_sum(result[0], group), *result[1:])
        return _sum(result, group)

    def _can(self) -> bool:
        if not self.known or torch.compiler.is_compiling():
            return False
        for owner, name, part in self.parts:
            if getattr(owner, name, None) is not part:
                return False
            forward = vars(part).get("forward")
            if forward is not None and type(part) is not nn.Sequential and not _is_of_style(forward):
                return False
            if type(part) is nn.Linear and not (isinstance(part.weight, DTensor) and part.weight.device_mesh.ndim == 1):
                return False
        return True

    @contextmanager
    def _parts_of_parameters(self) -> Iterator[None]:
        """Let the module and its parts have plain parameters, and no styles, within this context."""
        modules = [self.module, *(part for _, _, part in self.parts)]
        found = [
            (module._parameters, name, parameter, module in self.gathered)
            for module in modules
            for name, parameter in module._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        divided = [parameter for _, _, parameter, _ in found]
        parts = _Parts.apply(*divided) if torch.is_grad_enabled() else [p.to_local() for p in divided]
        forwards = [(vars(part), vars(part).pop("forward", None)) for part in modules[1:]]
        for (parameters, name, parameter, gathered), part in zip(found, parts, strict=True):
            parameters[name] = _gather(parameter, part, self.mesh.get_group()) if gathered else part
        try:
            yield
        finally:
            for parameters, name, parameter, _ in found:
                parameters[name] = parameter
            for attributes, forward in forwards:
                if forward is not None:
                    attributes["forward"] = forward


def _is_of_style(forward: Any) -> bool:
    """Whether a style of transformers made this forward pass."""
    return getattr(forward, "__qualname__", "").startswith("TensorParallelLayer.install_forward")


def _gather(parameter: DTensor, part: Tensor, group: Any) -> Tensor:
    """All of a parameter whose rows are divided. Each rank makes another gradient of it, and gets the sum for its part.

    Args:
        parameter: as the model has it.
        part: this rank's.
        group: the ranks.
    """
    if part.shape[0] * dist.get_world_size(group) == parameter.shape[0]:
        return _Gathered.apply(part, group)
    return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class _Gathered(torch.autograd.Function):
    """Rows of all ranks. DTensors could do the same, in several times as much of the host's time."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        rows = part.new_empty(part.shape[0] * dist.get_world_size(group), *part.shape[1:])
        dist.all_gather_into_tensor(rows, part.contiguous(), group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        part = gradient.new_empty(gradient.shape[0] // dist.get_world_size(ctx.group), *gradient.shape[1:])
        dist.reduce_scatter_tensor(part, gradient.contiguous(), group=ctx.group)
        return part, None


class _Parts(torch.autograd.Function):
    """This rank's parts of DTensors, all at once: `to_local` for each would take the host several times as long."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layouts = [(p.device_mesh, p.placements, p.shape, p.stride()) for p in parameters]
        return tuple([p.to_local().detach() for p in parameters])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        return tuple(
            None
            if gradient is None
            else DTensor.from_local(gradient, mesh, placements, run_check=False, shape=shape, stride=stride)
            for gradient, (mesh, placements, shape, stride) in zip(gradients, ctx.layouts, strict=True)
        )


class _SumGradient(torch.autograd.Function):
    """The input, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # autograd may read it elsewhere
        return _sum(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over the ranks, in place; its gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _sum(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        return _Sum.apply(x, group)
    dist.all_reduce(x, group=group)
    return x
