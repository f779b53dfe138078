"""FSDP2 for models whose parameters have two dtypes."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers.modeling_utils import PreTrainedModel

from deltazoo._report import RunsDeltaRule
from deltazoo.layers import DeltaRuleAttention

_ONE_GROUP = 2**29
"""Parameters up to which blocks are one group: gathered in 16 bits, they, their gradients and the
copies that captured steps read are 3 GiB."""


def fully_shard_model(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """The model, sharded by `torch.distributed.fsdp.fully_shard`, with gate parameters in float32.

    Each block is a group, whose parameters are gathered when they are needed. Every group takes time of the host, for
    which GPUs wait in small models: up to half a billion parameters, all blocks are one group, and training steps may
    run captured.

    FSDP2 gathers parameters in groups, each of one dtype, and casts a group as its `mp_policy` says. Here the
    parameters that layers keep in float32 (`A_log`, `dt_bias`) form one group of the whole model that is never cast.
    accelerate and Trainer always put a whole block into one group; they do not shard a model that is sharded already.

    The policy casts the arguments of the model, except numbers: 16 bits do not hold the number of labels, by which the
    loss is divided. Its `output_dtype` is that of the model's results, and no group inside casts what it returns.

    In accelerated layers of transformers all parameters but those of linear maps stay float32.

    Args:
        model: one of ours, a swapped or an accelerated one; changed in place.
        options: arguments of `fully_shard`, such as `mesh`, `mp_policy` and `offload_policy`.

    Returns:
        The model.
    """
    policy = options.get("mp_policy")
    casts = policy is not None and (policy.param_dtype, policy.reduce_dtype) != (None, None)
    of_model = dict(options)
    if policy is not None:
        of_model["mp_policy"] = replace(policy, cast_forward_inputs=False)
        options["mp_policy"] = replace(policy, output_dtype=None)
    blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    if sum(parameter.numel() for parameter in model.parameters()) <= _ONE_GROUP:
        blocks = []
    if casts or _num_dtypes(model) > 1:
        _shard_with_gates(model, blocks, options, of_model)
    else:
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(model, **of_model)
    if policy is not None and policy.param_dtype is not None and policy.cast_forward_inputs:
        model.register_forward_pre_hook(partial(_cast_arguments, dtype=policy.param_dtype), with_kwargs=True)
    return model


def _cast_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with tensors of floats in a dtype, except numbers, such as that of the labels."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 1 else x

    return tuple(cast(x) for x in args), {name: cast(x) for name, x in kwargs.items()}


def _num_dtypes(model: nn.Module) -> int:
    return len({parameter.dtype for parameter in model.parameters()})


def _shard_with_gates(
    model: PreTrainedModel, blocks: list[nn.Module], options: dict[str, Any], of_model: dict[str, Any]
) -> None:
    """Shard a model with the parameters that layers keep in float32 in groups that are not cast.

    The gates of all layers are the group of the base model, since every group costs two collectives and much of the
    host's time in each step. FSDP2 does not look for parameters in modules that have a group already, so the outer
    modules come first. A model without a head is its own base; then each layer's gates are a group.
    """
    gate_options = {name: value for name, value in options.items() if name != "mp_policy"}
    for foreign in [module for module in model.modules() if isinstance(module, RunsDeltaRule)]:
        fully_shard([module for module in foreign.modules() if isinstance(module, nn.Linear)], **options)
        fully_shard(foreign, **gate_options)

    base, layers = model.base_model, _layers_with_gates(model)
    _shard(model, _gates(model) | {parameter for block in blocks for parameter in block.parameters()}, of_model)
    if base is not model and layers:
        _shard(base, set(model.parameters()) - _gates(model), gate_options)
    for block in blocks:
        _shard(block, _gates(model), options)
    if base is model:
        for layer in layers:
            _shard(layer, set(model.parameters()) - _gates(model), gate_options)


def _shard(module: nn.Module, leave: set[nn.Parameter], options: dict[str, Any]) -> None:
    """Call `fully_shard` with these options, and leave further parameters out of the group."""
    fully_shard(module, **{**options, "ignored_params": leave | (options.get("ignored_params") or set())})


def _layers_with_gates(model: nn.Module) -> list[DeltaRuleAttention]:
    layers = (module for module in model.modules() if isinstance(module, DeltaRuleAttention))
    return [layer for layer in layers if layer.kept_in_float32()]


def _gates(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that layers keep in float32; sharding replaces parameters, so call this again after it."""
    return {parameter for layer in _layers_with_gates(model) for parameter in layer.kept_in_float32()}
