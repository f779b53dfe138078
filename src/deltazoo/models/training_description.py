"""Kernels, recomputation and loss of a training step in words, with reasons; for `deltazoo.report`."""

from collections.abc import Mapping
from typing import Any

from deltazoo.layers.recompute_levels import level_of
from deltazoo.models.block import DeltaRuleBlock
from deltazoo.models.loss import fuses_loss, obstacle_to_fused_loss
from deltazoo.ops.fused import fused_kernels_fit

__all__ = ["describe_blocks", "describe_loss"]


def describe_blocks(model: Any) -> str:
    """How norms and MLPs are computed, and what is recomputed."""
    norm = next(module for module in model.modules() if isinstance(module, DeltaRuleBlock)).mlp_norm
    weight, runtime = norm.weight, model.runtime
    asked, liger = runtime.given(), bool(runtime.liger)
    fused = fused_kernels_fit(weight) if runtime.fused_kernels is None else runtime.fused_kernels
    default = f"default on {weight.device}"
    reason = _reason("liger" if liger else "fused_kernels", asked, default)
    lines = [
        f"norms: {_kernel(liger, norm.takes_kernel(weight))} ({reason})",
        f"MLP: {_kernel(liger, fused)} ({reason})",
        f"recomputed in training: {level_of(runtime.recompute, weight.device)} "
        f"({_reason('recompute', asked, default)})",
    ]
    return "\n".join(lines)


def _kernel(liger: bool, ours: bool) -> str:
    if liger:
        return "Liger's kernel"
    return "our Triton kernel" if ours else "plain torch"


def describe_loss(model: Any) -> str:
    """How a causal language model computes its loss."""
    asked, obstacle = model.runtime.given(), obstacle_to_fused_loss(model)
    way = "without the logits of all positions" if fuses_loss(model) else "from the logits of all positions"
    reason = _reason("fuse_linear_cross_entropy", asked, obstacle or f"default in {model.lm_head.weight.dtype}")
    return f"loss in training: {way} ({reason})"


def _reason(option: str, asked: Mapping[str, Any], otherwise: str) -> str:
    return f"{option}={asked[option]!r} was asked for" if option in asked else otherwise
