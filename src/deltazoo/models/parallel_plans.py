"""Which module goes where when a model is spread over several devices: the plans transformers reads from a config.

A tensor-parallel plan names a style for every module whose weights are divided; `tensor_parallel` has the styles that
transformers lacks. A plan lists only what the model has, so it is made from the configuration.
"""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deltazoo.models.configuration import DeltaRuleConfig

__all__ = ["PIPELINE_PLAN", "fsdp_plan", "tensor_parallel_plan"]

PIPELINE_PLAN: dict[str, Any] = {
    "embeddings": (["input_ids"], ["inputs_embeds"]),
    "layers": (["hidden_states", "sequences"], ["hidden_states"]),
    "norm": (["hidden_states"], ["hidden_states"]),
}
"""Inputs and outputs of each stage."""


def tensor_parallel_plan(config: "DeltaRuleConfig") -> dict[str, str]:
    """Style per module of the base model: heads divided in both kinds of mixers, channels in the MLPs.

    Softmax layers call their projections what linear layers call theirs, so the entries hold for both.
    """
    mixer: dict[str, str] = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
    if "linear_attention" in (config.layer_types or ()):
        mixer |= _gates(config)
    plan = {f"layers.*.attn.{name}": style for name, style in mixer.items()}
    # In this order: transformers before 5.17 takes the first entry that a parameter's name begins with.
    plan |= {"layers.*.attn_norm": "delta_rule_whole", "layers.*.attn": "delta_rule_heads"}
    plan |= {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    if config.tie_word_embeddings:
        plan["embeddings"] = "embedding_rowwise"  # as the output head's matrix, which it is
    return plan


def fsdp_plan(config: "DeltaRuleConfig") -> dict[Any, str]:
    """What FSDP2 gathers together, per module of the base model, and whether it frees it after the forward pass.

    A group has one dtype. So in a model of half precision the modules inside a mixer are groups of their own, and what
    is left to the mixer itself are its gate parameters in float32.
    """
    blocks = "free_full_weight"
    plan: dict[Any, str] = {"embeddings": blocks, "layers.*": blocks, "norm": "keep_full_weight"}
    gated = "linear_attention" in (config.layer_types or ()) and config.spec.decay != "none"
    if gated and config.dtype in (torch.bfloat16, torch.float16):
        mixer = ["q_proj", "k_proj", "v_proj", "o_proj", *(name.removesuffix(".*") for name in _gates(config))]
        if config.use_short_conv:
            mixer += ["q_conv1d", "k_conv1d", "v_conv1d"]
        plan = {**{f"layers.*.attn.{name}": blocks for name in mixer}, "layers.*.attn": blocks, **plan}
    return plan


def _gates(config: "DeltaRuleConfig") -> dict[str, str]:
    spec = config.spec
    gates = {"o_norm": "delta_rule_shared_norm"}
    if spec.corrects:
        gates["b_proj"] = "colwise"
    if spec.decay == "scalar":
        gates["a_proj"] = "colwise"
    elif spec.decay == "channel":
        gates |= _low_rank("f_proj")
    if spec.output_gate == "full":
        gates["g_proj"] = "colwise"
    elif spec.output_gate == "low_rank":
        gates |= _low_rank("g_proj")
    return gates


def _low_rank(name: str) -> dict[str, str]:
    # A plan cannot tell the two halves of a sequence apart. Both are divided and gathered; the layer takes its heads.
    return {f"{name}.*": "colwise_gather_output"}
