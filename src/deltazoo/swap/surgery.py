"""Swapping the attention layers of a live model, and putting them back."""

from typing import Any

import torch
from transformers import PreTrainedModel

from deltazoo.runtime import RuntimeOptions
from deltazoo.spec import get_rule
from deltazoo.swap.families import FAMILIES, ModelFamily, decoder_layers_of
from deltazoo.swap.layer import SwappedAttention, build_swapped_attention, swapped_layers
from deltazoo.swap.models import SwappedModel, register_swapped_classes, turn_back, turn_into_swapped
from deltazoo.swap.plan import LayerChoice, LayerPlan, check_layer_options, check_model, plan_layers
from deltazoo.swap.report import SwapReport, report_swap
from deltazoo.swap.transfer import read_attention, transfer


def swap_attention(
    model: PreTrainedModel,
    rule: str,
    layers: LayerChoice = "all",
    init: str = "transfer",
    *,
    rope: bool = True,
    qk_norm: bool = True,
    grouped: bool = False,
    keep_teacher: bool = False,
    dry_run: bool = False,
    **layer_options: Any,
) -> SwapReport:
    """Replace attention layers of a transformers model by delta-rule layers, in place.

    MLPs, norms, embeddings and the other softmax layers, with their masks, windows and cache, stay bit for bit. The
    model saves with `save_pretrained` and comes back through the Auto classes after `import deltazoo`. An error leaves
    all layers unswapped.

    Args:
        model: a model with any head, or a base model, of a family in `deltazoo.swap.FAMILIES`.
        rule: name of the rule, one of `deltazoo.list_rules()`.
        layers: `"all"`, a ratio of delta-rule to softmax layers such as `"3:1"`, numbers from 0 (also as text:
            `"0,2,5"`), or a function from number to bool.
        init: `"transfer"` copies the projections and starts everything else so that it hardly changes the first forward
            pass (`deltazoo.swap.transfer`); `"random"` starts every parameter as in the rule's paper.
        rope: whether to keep the rotary embedding of queries and keys, if the model has one.
        qk_norm: whether to keep the norms of queries and keys, if the model has them, before the rule's own L2 norm.
        grouped: whether keys and values of grouped-query attention stay shared, in the original matrices; otherwise
            every head gets a copy. The states have the same size either way, since every head has its own step sizes
            and decays.
        keep_teacher: whether to keep the attention modules, frozen, as `SwappedAttention.teacher`, for distillation and
            for `unswap_attention`.
        dry_run: whether to change nothing and only report what would happen.
        layer_options: further options of `deltazoo.layers.DeltaRuleAttention`, such as `conv_size` or
            `allow_neg_eigval`. Sizes (`num_heads`, `head_dim`, ...) only with `init="random"`. `backend` and
            `fused_kernels` say how the layers run: they are not saved, and `model.set_runtime` changes them.

    Returns:
        The report: parameters copied, created and dropped per layer, and parameters and memory before and after.

    Raises:
        ValueError: a model that cannot be swapped, or arguments that do not fit it or each other.
        TypeError: a model that is not of transformers, or an unknown option.
    """
    family = check_model(model)
    switches = {"rope": rope, "qk_norm": qk_norm, "grouped": grouped, "keep_teacher": keep_teacher, "dry_run": dry_run}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    get_rule(rule)
    if init not in ("transfer", "random"):
        raise ValueError(f'init must be "transfer" or "random", got {init!r}')
    check_layer_options(layer_options, init, rule, ("layers", "init", *switches))
    runtime = {name: layer_options.pop(name) for name in SwappedModel.runtime_options if name in layer_options}
    options = RuntimeOptions(**runtime)
    plans = plan_layers(
        model, family, rule, layers, init, rope=rope, qk_norm=qk_norm, grouped=grouped, layer_options=layer_options
    )
    replacements = [_build(model, family, plan, init, keep_teacher, dry_run) for plan in plans]
    for replacement in replacements:
        replacement.delta.use_runtime(options)
    report = report_swap(model, family, rule, init, dry_run, plans, replacements)
    if not dry_run:
        register_swapped_classes(family.model_type)
        for plan, replacement in zip(plans, replacements, strict=True):
            replacement.freeze_teacher()
            setattr(decoder_layers_of(model, family)[plan.index], family.attention, replacement)
        turn_into_swapped(model, {str(plan.index): plan.options for plan in plans})
        model.set_runtime(**runtime)  # type: ignore[operator]
    return report


def _build(
    model: PreTrainedModel, family: ModelFamily, plan: LayerPlan, init: str, keep_teacher: bool, dry_run: bool
) -> SwappedAttention:
    """The replacement of one layer; in a dry run its parameters are on the meta device."""
    weight = plan.attention.get_submodule(family.output).weight
    with torch.device("meta" if dry_run else weight.device):  # type: ignore[arg-type]
        teacher = plan.attention if keep_teacher else None
        swapped = build_swapped_attention(family, model.config, plan.index, plan.options, teacher)
        swapped.delta.to(weight.dtype)  # type: ignore[arg-type]
    if init == "transfer" and not dry_run:
        decoder_layer = decoder_layers_of(model, family)[plan.index]
        input_norm = None if family.input_norm is None else decoder_layer.get_submodule(family.input_norm)
        weights = read_attention(family, plan.attention, plan.shape, plan.index)
        transfer(swapped.delta, weights, input_norm)
    return swapped.train(plan.attention.training)


def unswap_attention(model: PreTrainedModel) -> None:
    """Put the attention layers back that `swap_attention(..., keep_teacher=True)` kept; the model is then unswapped.

    Raises:
        ValueError: the model was not swapped, or its attention layers were not kept.
    """
    if not isinstance(model, SwappedModel):
        raise ValueError(f"{type(model).__name__} is not a swapped model")
    swapped = swapped_layers(model)
    lost = [index for index, layer in swapped.items() if layer.teacher is None]
    if lost:
        raise ValueError(
            f"the softmax attention of layers {lost} was not kept; only swap_attention(..., keep_teacher=True) in the "
            "same process can be undone"
        )
    family = FAMILIES[model.config.original_model_type]
    decoder_layers = decoder_layers_of(model, family)
    for index, layer in swapped.items():
        setattr(decoder_layers[index], family.attention, layer.release_teacher())
    turn_back(model)
