"""Lines for `deltazoo.report`: how a training step of a model computes norms, MLPs and the loss, and why."""

from typing import Any

from deltazoo.layers.recompute_levels import SMALL_BATCH, level_of
from deltazoo.models.block import DeltaRuleBlock
from deltazoo.models.loss import fuses_loss, loss_obstacle
from deltazoo.ops.fused import takes_kernel


def describe_training(model: Any) -> str:
    """The lines of a model; only one with a language-modelling head has a loss."""
    weight = next(module for module in model.modules() if isinstance(module, DeltaRuleBlock)).mlp_norm.weight
    runtime, asked = model.runtime, model.runtime.given()

    def reason(option: str, otherwise: str = f"default on {weight.device}") -> str:
        return f"{option}={asked[option]!r} was asked for" if option in asked else otherwise

    def kernel(columns: int) -> str:
        wanted = runtime.fused_kernels
        ours = takes_kernel(None, weight, columns=columns) if wanted is None else wanted
        return f"{'our Triton kernel' if ours else 'plain torch'} ({reason('fused_kernels')})"

    level = level_of(runtime.recompute, weight.device)
    if level != level_of(runtime.recompute, weight.device, 0):
        level += f", none in batches of up to {SMALL_BATCH // len(weight):,} tokens"
    lines = [
        f"norms: {kernel(len(weight))}",
        f"MLP: {kernel(1)}",
        f"recomputed in training: {level} ({reason('recompute')})",
    ]
    if "fuse_linear_cross_entropy" in model.runtime_options:
        way = "without the logits of all positions" if fuses_loss(model) else "from the logits of all positions"
        default = loss_obstacle(model) or f"default in {model.lm_head.weight.dtype}"
        lines.append(f"loss in training: {way} ({reason('fuse_linear_cross_entropy', default)})")
    return "\n".join(lines)
