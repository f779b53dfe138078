"""Plans that divide a model among several devices, in the form that transformers reads from a configuration.

A tensor-parallel plan names a style for every module whose weights are divided; `tensor_parallel` has the styles that
transformers lacks. A plan lists only modules that the model has, so it is made from the configuration.
"""

from collections.abc import Mapping
from typing import Any

import torch

from deltazoo.layers import DeltaRuleAttention, layer_class, make_layer
from deltazoo.spec import RuleSpec

__all__ = ["FSDP_PLAN", "PIPELINE_PLAN", "tensor_parallel_plan"]

PIPELINE_PLAN: dict[str, Any] = {
    "embeddings": (["input_ids"], ["inputs_embeds"]),
    "layers": (["hidden_states", "batch"], ["hidden_states"]),
    "norm": (["hidden_states"], ["hidden_states"]),
}
"""Inputs and outputs of each pipeline stage."""

FSDP_PLAN: dict[Any, str] = {
    "embeddings": "free_full_weight",
    "layers.*": "free_full_weight",
    "norm": "keep_full_weight",
}
"""Modules of the base model that FSDP2 gathers as one group, and whether it frees the group after the forward pass.
Models of half precision add their gates (`deltazoo.models.delta_layers.declare_gates`)."""

_STYLES = {"heads": "colwise", "whole": "delta_rule_shared_norm"}


def tensor_parallel_plan(
    spec: RuleSpec | None, options: Mapping[str, Any], *, softmax_norms: bool = False
) -> dict[str, str]:
    """Styles by module of the base model: attention layers of both kinds are divided by heads, MLPs by channels.

    Projections have the same names in softmax and in linear layers, so one entry holds for both.

    Args:
        spec: spec of the linear layers; None: the model has none.
        options: arguments of `make_layer` for them.
        softmax_norms: whether the softmax layers normalise queries and keys.

    Returns:
        Styles by module. The plan is empty, so that transformers refuses tensor parallelism, for linear layers whose
        projections make several micro-steps: the rows of one matrix belong to steps, then to heads.
    """
    if spec is not None and options["num_micro_steps"] > 1 and layer_class(spec).projects_micro_steps:
        return {}
    attention: dict[str, str] = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
    if spec is not None:
        attention |= _gates(spec, options)
    if softmax_norms:
        attention |= dict.fromkeys(("q_norm", "k_norm"), "delta_rule_shared_norm")
    plan = {"embeddings": "embedding_rowwise"} | {f"layers.*.attn.{name}": style for name, style in attention.items()}
    # In this order: transformers before 5.17 takes the first entry that a parameter's name begins with.
    plan |= {"layers.*.attn_norm": "delta_rule_whole", "layers.*.attn": "delta_rule_heads"}
    plan |= {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "layers.*.mlp_norm": "delta_rule_whole",
        "layers.*.mlp": "delta_rule_mlp",
    }
    return plan


def _gates(spec: RuleSpec, options: Mapping[str, Any]) -> dict[str, str]:
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
    layer = layer_class(spec)
    if layer is DeltaRuleAttention:
        return gates
    # A subclass declares what it adds, and may lack maps that its spec implies. Its own parameters follow the layer's
    # style.
    with torch.device("meta"):
        modules = dict(make_layer(**options).named_children())
    for name, division in layer.tensor_parallel.items():
        gates |= _low_rank(name) if division == "low_rank" else {name: _STYLES[division]}
    return {name: style for name, style in gates.items() if name.removesuffix(".*") in modules}


def _low_rank(name: str) -> dict[str, str]:
    # A plan cannot name the two maps of an nn.Sequential. Both are divided and gathered; the layer takes its heads.
    return {f"{name}.*": "colwise_gather_output"}
