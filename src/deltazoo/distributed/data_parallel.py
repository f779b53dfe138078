"""FSDP2 for models with delta-rule layers, whose parameters have two dtypes."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.modeling_utils import PreTrainedModel

from deltazoo.layers import DeltaRuleAttention
from deltazoo.layers.backend_report import RunsDeltaRule

__all__ = ["fully_shard_model"]


def fully_shard_model(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """Shard a model with `torch.distributed.fsdp.fully_shard`, block by block, with gate parameters in float32.

    FSDP2 gathers parameters in groups, each of one dtype, and casts a group as its `mp_policy` says. Here the
    parameters that a layer keeps in float32 (`A_log`, `dt_bias`) form a group of their own that is never cast. Where
    nothing is cast and all parameters have one dtype, a block is one group, with fewer collectives. accelerate and
    Trainer put a whole block into one group always; they do not shard a model that is sharded already.

    In accelerated layers of transformers all parameters but those of linear maps stay float32.

    Args:
        model: one of ours, a swapped or an accelerated one; changed in place.
        options: of `fully_shard`, such as `mesh`, `mp_policy` and `offload_policy`.

    Returns:
        The model.
    """
    blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    policy = options.get("mp_policy")
    casts = policy is not None and (policy.param_dtype, policy.reduce_dtype) != (None, None)
    if casts or _num_dtypes(model) > 1:
        _shard_gates(model, options)
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def _num_dtypes(model: nn.Module) -> int:
    return len({parameter.dtype for parameter in model.parameters()})


def _shard_gates(model: nn.Module, options: dict[str, Any]) -> None:
    """Put what layers keep in float32 into groups that are not cast, and the rest of these layers into others."""
    gate_options = {name: value for name, value in options.items() if name != "mp_policy"}
    for layer in [module for module in model.modules() if isinstance(module, DeltaRuleAttention)]:
        if layer.kept_in_float32():
            fully_shard(list(layer.children()), **options)
            fully_shard(layer, **gate_options)
    for foreign in [module for module in model.modules() if isinstance(module, RunsDeltaRule)]:
        fully_shard([module for module in foreign.modules() if isinstance(module, nn.Linear)], **options)
        fully_shard(foreign, **gate_options)
