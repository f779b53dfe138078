"""Tensor parallelism by heads: each rank computes its share of the heads of an attention layer, linear or softmax.

transformers divides linear maps. The styles here divide the other parts that belong to heads: the weights of the
convolutions, decay rates, step biases and the numbers of heads. Then a layer runs the rule on its own heads as if there
were no others. The gradient of the output norm, which all heads share, is summed over the ranks.

transformers 5.17 changed the interface from hooks and plain tensors to DTensors; the classes support both. The styles
of transformers act on every linear map alone: each sums the gradient of its input over the ranks, and all of its
tensors are DTensors, whose operations take the host many times as long as those of plain ones. Here a whole attention
layer or MLP gets this rank's part of its parameters as plain tensors (`CallTogether`). It computes a summand of its
output, and in the backward pass a summand of the gradient of its input, and each is summed once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from deltazoo.layers import DeltaRuleAttention, RMSNorm, ShortConvolution
from deltazoo.layers.norm import GatedRMSNorm

__all__ = ["CallTogether", "DividedHeads", "DividedMLP", "SharedNorm", "Whole", "check_heads"]

# Parameters and modules of delta-rule layers that the plan or the styles here divide.
_DIVIDED = frozenset(
    {"A_log", "dt_bias", "o_norm", "q_conv1d", "k_conv1d", "v_conv1d"}
    | {f"{name}_proj" for name in ("q", "k", "v", "o", "b", "a", "f", "g")}
)
_KNOWN_PARTS = (nn.Linear, ShortConvolution, nn.Sequential, RMSNorm, GatedRMSNorm)


class DividedHeads(TensorParallelLayer):
    """Style of an attention layer, linear or softmax; its projections have styles of their own."""

    device_mesh: Any
    rank: Any

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Give the module its share (transformers from 5.17)."""
        check_heads(module, mesh.size())
        plain, gathered = module.forward, []
        shared: list[nn.Module] = [x for x in module.children() if isinstance(x, RMSNorm)]
        if isinstance(module, DeltaRuleAttention):
            for owner in (module, *_convolutions(module)):
                for name, parameter in list(owner.named_parameters(recurse=False)):
                    if name not in _whole_parameters(owner):
                        _divide_rows(owner, name, parameter, mesh)
                super().install_forward(owner, mesh)
            _take_share(module, mesh)
            gathered = [gate[0] for gate in _low_rank(module)]
            shared = _whole_modules(module)
        prepare = [partial(_SumGradients(mesh), part, ()) for part in shared]
        module.forward = CallTogether(module, mesh, plain, gathered=gathered, prepare=prepare)
        return module

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """True: in the forward pass a module has its rank's part of its parameters."""
        return True

    def validate_module(self, module: nn.Module, device_mesh: Any, layer_name: str = "") -> None:
        """Refuse heads that do not divide, and parameters that heads share (transformers before 5.17)."""
        check_heads(module, device_mesh.size())
        if shared := _whole_parameters(module):  # that interface divides every parameter of the layer
            raise ValueError(f"{type(module).__name__} shares {', '.join(shared)} among heads: needs transformers 5.17")

    def prepare_module_tp(self, module: nn.Module, device_mesh: Any, **kwargs: Any) -> None:
        """Give the module its share (transformers before 5.17)."""
        if isinstance(module, DeltaRuleAttention):
            _take_share(module, device_mesh)

    def shard_tensor(self, param: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None) -> Tensor:
        """This rank's rows of a tensor in a checkpoint (transformers before 5.17)."""
        rows = self.get_expected_sharded_shape(param.shape if isinstance(param, Tensor) else param.get_shape())[0]
        return param[self.rank * rows : (self.rank + 1) * rows].to(device=device, dtype=dtype)

    def get_expected_sharded_shape(self, full_shape: Any) -> tuple[int, ...]:
        """Shape of this rank's rows (transformers before 5.17)."""
        return full_shape[0] // self.device_mesh.size(), *full_shape[1:]


class Whole(TensorParallelLayer):
    """Style of a module that every rank has whole, with the same input and the same gradients."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Return the module unchanged (transformers from 5.17)."""
        return module

    def prepare_module_tp(self, module: nn.Module, device_mesh: Any, **kwargs: Any) -> None:
        """Change nothing (transformers before 5.17)."""

    def shard_tensor(self, param: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None) -> Tensor:
        """The whole tensor (transformers before 5.17)."""
        return param[...].to(device=device, dtype=dtype)


class DividedMLP(Whole):
    """Style of an MLP whose linear maps have styles of their own."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Exchange once in each pass (transformers from 5.17)."""
        module.forward = CallTogether(module, mesh, module.forward)
        return module


class SharedNorm(Whole):
    """Style of the norm that all heads share: every rank has the whole weight, and gradients are summed over the ranks.

    transformers' own style sums the accumulated gradient after every backward pass, which is wrong with gradient
    accumulation.
    """

    def prepare_module_tp(self, module: nn.Module, device_mesh: Any, **kwargs: Any) -> None:
        """Hook the module (transformers before 5.17; from there on `DividedHeads` sums, as hooks keep kernels away)."""
        module.register_forward_pre_hook(_SumGradients(device_mesh))


class _SumGradients:
    """A forward pre-hook that makes the backward pass sum the gradients of a module's parameters over the ranks.

    Loading a checkpoint replaces parameters after the hook was made, so it registers with them at their first use.

    Args:
        mesh: the ranks.
        names: names of the parameters; default: all of the module's own.
    """

    def __init__(self, mesh: Any, names: Sequence[str] | None = None) -> None:
        self.mesh = mesh
        self.names = names
        self.hooked: dict[str, nn.Parameter] = {}

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if self.names is not None and name not in self.names:
                continue
            if torch.is_grad_enabled() and parameter.requires_grad and self.hooked.get(name) is not parameter:
                parameter.register_hook(self._sum)
                self.hooked[name] = parameter

    def _sum(self, gradient: Tensor) -> Tensor:
        # Another parameter's gradient may share this memory.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=self.mesh.get_group())
        return gradient


@runtime_checkable
class HasHeads(Protocol):
    """A softmax layer that divides by heads."""

    def head_counts(self) -> dict[str, int]:
        """Numbers that the ranks must divide, by their names in the configuration."""


def check_heads(module: nn.Module, ranks: int) -> None:
    """Raise ValueError unless the ranks can divide an attention layer; TypeError for another module."""
    if isinstance(module, DeltaRuleAttention):
        counts = {"num_heads": module.num_heads}
        if module.projected_steps > 1:
            raise ValueError(
                f"tensor parallelism needs num_micro_steps=1, got {module.projected_steps}: keys of several steps are "
                "in one matrix, which transformers would divide between the steps instead of between the heads"
            )
        _check_declared(module)
    elif isinstance(module, HasHeads):
        counts = module.head_counts()
    else:
        raise TypeError(
            f"delta_rule_heads is a style for the attention layers of deltazoo, got {type(module).__name__}"
        )
    for name, count in counts.items():
        if count % ranks:
            raise ValueError(
                f"tensor parallelism divides heads: {name}={count} of layer {module.layer_idx} is no multiple of the "
                f"{ranks} ranks"
            )


def _check_declared(layer: DeltaRuleAttention) -> None:
    """Refuse a subclass with parameters or modules whose division it does not declare."""
    own = [name for name, _ in layer.named_parameters(recurse=False)]
    own += [name for name, child in layer.named_children() if any(True for _ in child.parameters())]
    for name in own:
        if name not in _DIVIDED and name not in layer.tensor_parallel:
            raise ValueError(
                f'{type(layer).__name__} does not say in tensor_parallel how {name!r} is divided: "heads" if its rows '
                'belong to heads, "whole" if all heads share it, "low_rank" if `low_rank` made it'
            )


def _whole_parameters(module: nn.Module) -> list[str]:
    """The layer's own parameters that all its heads share."""
    declared = module.tensor_parallel if isinstance(module, DeltaRuleAttention) else {}
    return [name for name, division in declared.items() if division == "whole" and name in module._parameters]


def _whole_modules(layer: DeltaRuleAttention) -> list[nn.Module]:
    """The output norm, and other modules that all heads share."""
    declared = [name for name, division in layer.tensor_parallel.items() if division == "whole"]
    return [module for name, module in layer.named_children() if name in ("o_norm", *declared)]


def _convolutions(layer: DeltaRuleAttention) -> list[ShortConvolution]:
    return [child for child in layer.children() if isinstance(child, ShortConvolution)]


def _divide_rows(owner: nn.Module, name: str, parameter: nn.Parameter, mesh: Any) -> None:
    rows = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
    owner._parameters[name] = nn.Parameter(rows, requires_grad=parameter.requires_grad)


def _take_share(layer: DeltaRuleAttention, mesh: Any) -> None:
    ranks, rank = mesh.size(), mesh.get_local_rank()
    layer.head_share = (rank, ranks)
    layer.num_heads //= ranks
    layer.num_v_heads //= ranks
    for convolution in _convolutions(layer):
        convolution.channels //= ranks
    if shared := _whole_parameters(layer):
        layer.register_forward_pre_hook(_SumGradients(mesh, shared))
    for gate in _low_rank(layer):
        gate.forward = partial(_own_heads, gate.forward, rank, ranks)  # type: ignore[method-assign]


def _low_rank(layer: DeltaRuleAttention) -> list[nn.Sequential]:
    """The maps made by `low_rank`."""
    declared = [name for name, division in layer.tensor_parallel.items() if division == "low_rank"]
    found = [getattr(layer, name, None) for name in dict.fromkeys(("f_proj", "g_proj", *declared))]
    return [gate for gate in found if isinstance(gate, nn.Sequential)]


def _own_heads(forward: Callable[[Tensor], Tensor], rank: int, ranks: int, x: Tensor) -> Tensor:
    """This rank's part of the output of a low-rank map, which has all heads (see `plans`)."""
    return forward(x).chunk(ranks, dim=-1)[rank]


class CallTogether:
    """The forward pass of a module whose parts have tensor-parallel styles, with one exchange for all of them.

    The parts' own styles act instead in compiled code, if something else has replaced the parts' forward passes, or if
    parts are of another kind than before or than this knows (adapters, quantised maps).

    Args:
        module: the module whose `forward` this replaces.
        mesh: the ranks.
        forward: the module's forward pass without styles; at construction the module has the one with styles.
        gathered: linear maps that each rank computes whole; their weights are divided, and gathered for the call.
        prepare: function called before every forward pass.
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
        """The module's output, equal on all ranks."""
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
        """A context in which the module and its parts have plain parameters and no styles."""
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
    """The whole of a parameter whose rows are divided. Its gradients differ among ranks; a part gets the sum.

    Args:
        parameter: the model's parameter.
        part: this rank's part.
        group: the ranks.
    """
    if part.shape[0] * dist.get_world_size(group) == parameter.shape[0]:
        return _Gathered.apply(part, group)
    return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class _Gathered(torch.autograd.Function):
    """The rows of all ranks. DTensors could gather them, in several times as much of the host's time."""

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
        # Autograd makes gradients contiguous like the parameter for plain parameters alone, and fused optimizers rely
        # on it. The gradient of a convolution's taps comes transposed.
        return tuple(
            None
            if gradient is None
            else DTensor.from_local(
                gradient.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
            )
            for gradient, (mesh, placements, shape, stride) in zip(gradients, ctx.layouts, strict=True)
        )


class _SumGradient(torch.autograd.Function):
    """The input, with a gradient that is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # autograd may read it elsewhere
        return _sum(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over the ranks, in place; its gradient is equal on all of them."""

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


_STYLES = {
    "delta_rule_heads": DividedHeads(),
    "delta_rule_mlp": DividedMLP(),
    "delta_rule_shared_norm": SharedNorm(),
    "delta_rule_whole": Whole(),
}
for _name, _style in _STYLES.items():
    ALL_PARALLEL_STYLES.register(_name, _style)  # type: ignore[arg-type]
if hasattr(ALL_PARALLEL_STYLES, "register_plan_to_weight_dim"):  # the older interface
    ALL_PARALLEL_STYLES.register_plan_to_weight_dim("delta_rule_heads", 0)  # axis along which saving joins shares
