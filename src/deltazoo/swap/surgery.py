"""Swapping the attention layers of a live model, and putting them back."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from deltazoo.layers import layer_class
from deltazoo.spec import get_variant
from deltazoo.swap.attention_weights import HeadShape, read_attention, read_shape
from deltazoo.swap.cache_memory import memory_of_swap, sliding_window, state_bytes
from deltazoo.swap.families import FAMILIES, ModelFamily, decoder_layers_of
from deltazoo.swap.layer_choice import LayerChoice, choose_layers
from deltazoo.swap.starting_point import copied_parameters, transfer
from deltazoo.swap.suitability import check_model
from deltazoo.swap.swap_report import LayerSwap, SwapReport
from deltazoo.swap.swapped_attention import SwappedAttention
from deltazoo.swap.swapped_models import (
    SwappedModel,
    build_swapped_attention,
    install,
    register_swapped_classes,
    relabel,
    uninstall,
)

__all__ = ["swap_attention", "swapped_layers", "unswap_attention"]

# Decided by the layer's index, by the original weights or by arguments of `swap_attention`.
_DECIDED = frozenset({"self", "variant", "hidden_size", "layer_idx", "initializer_range", "beta_bias"})
# Sizes that copied weights bring along.
_SIZES = ("num_heads", "head_dim", "num_v_heads", "expand_v", "num_micro_steps")


@dataclass(frozen=True)
class _Plan:
    """One layer, before anything is changed."""

    index: int
    attention: nn.Module
    shape: HeadShape
    options: dict[str, Any]


def swap_attention(
    model: PreTrainedModel,
    variant: str,
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

    Everything else stays, bit for bit: MLPs, norms, embeddings, and the softmax attention of layers not chosen, with
    its masks, windows and cache. The model saves with `save_pretrained` and comes back through the Auto classes after
    `import deltazoo`. Either all chosen layers are swapped or, after an error, none.

    Args:
        model: with any head, or the base model, of a family in `deltazoo.swap.FAMILIES`.
        variant: one of `deltazoo.list_variants()`.
        layers: `"all"`, a ratio of delta-rule to softmax layers such as `"3:1"`, numbers from 0, or a function from
            number to bool.
        init: `"transfer"` copies projections and starts the rest so that the first forward pass is sane
            (`deltazoo.swap.starting_point` says how); `"random"` starts every parameter as in the variant's paper.
        rope: keep the rotary embedding of queries and keys, where the model has one.
        qk_norm: keep the norms of queries and keys, where the model has them, before the variant's own L2 norm.
        grouped: keep keys and values of grouped-query attention shared, in the original matrices, instead of giving
            every head a copy. States are as large either way: step sizes and decays are a head's own.
        keep_teacher: keep the attention modules, frozen, as `SwappedAttention.teacher`: for distillation, and for
            `unswap_attention`.
        dry_run: change nothing; report what would happen.
        layer_options: further options of `deltazoo.layers.DeltaRuleAttention`, such as `conv_size` or
            `allow_neg_eigval`. Sizes (`num_heads`, `head_dim`, ...) only with `init="random"`. `backend` and
            `fused_kernels` say how the layers run: they are not saved, and `model.set_runtime` changes them.

    Returns:
        What was copied, created and dropped, and what became of parameters and memory.

    Raises:
        ValueError: a model that cannot be swapped, or arguments that do not fit it or each other.
        TypeError: not a transformers model, or an unknown option.
    """
    family = check_model(model)
    get_variant(variant)
    if init not in ("transfer", "random"):
        raise ValueError(f'init must be "transfer" or "random", got {init!r}')
    _check_options(layer_options, init, variant)
    runtime = {name: layer_options.pop(name) for name in SwappedModel.runtime_options if name in layer_options}
    decoder_layers = decoder_layers_of(model, family)
    plans = []
    for index in choose_layers(layers, len(decoder_layers)):
        attention = decoder_layers[index].get_submodule(family.attention)
        shape = read_shape(family, attention, model.config, index)
        given = {"rope": rope and shape.has_rope, "qk_norm": qk_norm, "grouped": grouped}
        plans.append(_Plan(index, attention, shape, _options(variant, shape, init, given, layer_options)))

    replacements = [_build(model, family, plan, init, keep_teacher, dry_run) for plan in plans]
    report = _report(model, family, variant, init, dry_run, plans, replacements)
    if not dry_run:
        _replace(model, family, plans, replacements)
        model.set_runtime(**runtime)  # type: ignore[operator]
    return report


def _check_options(options: Mapping[str, Any], init: str, variant: str) -> None:
    constructors = (vars(kind).get("__init__") for kind in layer_class(variant).__mro__ if kind is not object)
    known = {name for made in constructors if made is not None for name in inspect.signature(made).parameters}
    known -= {*_DECIDED, "args", "kwargs", "options"}
    for name in options:
        if name not in known:
            raise TypeError(f"swap_attention has no option {name!r}; known layer options: {', '.join(sorted(known))}")
        if name in _SIZES and init == "transfer":
            raise ValueError(f'{name} is decided by the weights that init="transfer" copies; pass init="random"')


def _options(
    variant: str, shape: HeadShape, init: str, given: Mapping[str, bool], layer_options: Mapping[str, Any]
) -> dict[str, Any]:
    """What the configuration will record of one layer, defaults included."""
    spec = get_variant(variant)
    options: dict[str, Any] = {
        "variant": variant,
        "num_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "expand_v": 1.0,
        "rope": given["rope"],
        "qkv_bias": shape.qkv_bias,
        "o_bias": shape.o_bias,
    }
    if given["grouped"] and shape.num_kv_heads < shape.num_heads:
        options["num_kv_heads"] = shape.num_kv_heads
    if given["qk_norm"] and shape.qk_norm is not None:
        options |= {"qk_norm": shape.qk_norm, "qk_norm_eps": shape.qk_norm_eps}
    if init == "transfer":
        options |= {
            "activation": "identity",
            "beta_bias": spec.corrects,
            "gate_bias": spec.output_gate == "full",
        }
    return {**options, **layer_options}


def _build(
    model: PreTrainedModel, family: ModelFamily, plan: _Plan, init: str, keep_teacher: bool, dry_run: bool
) -> SwappedAttention:
    """The replacement of one layer; without memory behind its parameters in a dry run."""
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


def _replace(
    model: PreTrainedModel, family: ModelFamily, plans: list[_Plan], replacements: list[SwappedAttention]
) -> None:
    register_swapped_classes(family.model_type)
    decoder_layers = decoder_layers_of(model, family)
    for plan, replacement in zip(plans, replacements, strict=True):
        replacement.freeze_teacher()
        setattr(decoder_layers[plan.index], family.attention, replacement)
    relabel(model, {str(plan.index): plan.options for plan in plans})
    install(model, family)


def _report(
    model: PreTrainedModel,
    family: ModelFamily,
    variant: str,
    init: str,
    dry_run: bool,
    plans: list[_Plan],
    replacements: list[SwappedAttention],
) -> SwapReport:
    num_layers = len(decoder_layers_of(model, family))
    slot = f"{family.layers}.{{}}.{family.attention}"
    layers = []
    for plan, replacement in zip(plans, replacements, strict=True):
        names = [name for name, _ in replacement.delta.named_parameters()]
        copied = copied_parameters(replacement.delta) if init == "transfer" else []
        layers.append(
            LayerSwap(
                index=plan.index,
                path=slot.format(plan.index),
                copied=tuple(copied),
                created=tuple(name for name in names if name not in copied),
                dropped=tuple(_dropped(model, family, plan, init)),
                state_bytes=state_bytes(replacement.delta),
            )
        )
    before = sum(p.numel() for p in model.parameters())
    removed = sum(p.numel() for plan in plans for p in plan.attention.parameters())
    added = sum(p.numel() for replacement in replacements for p in replacement.parameters())
    return SwapReport(
        model_type=family.model_type,
        variant=variant,
        init=init,
        dry_run=dry_run,
        layers=tuple(layers),
        num_layers=num_layers,
        parameters_before=before,
        parameters_after=before - removed + added,
        memory=memory_of_swap(
            model.config, plans[0].shape, model.dtype, num_layers, {layer.index: layer.state_bytes for layer in layers}
        ),
    )


def _dropped(model: PreTrainedModel, family: ModelFamily, plan: _Plan, init: str) -> list[str]:
    """What of the original attention has no counterpart: parameters first, then properties without parameters."""
    lost = []
    if init == "random":
        lost += [name for name, _ in plan.attention.named_parameters()]
    elif plan.shape.qk_norm is not None and "qk_norm" not in plan.options:
        lost += [f"{name}.weight" for name in family.norms or ()]
    if plan.shape.has_rope and not plan.options["rope"]:
        lost.append("rotary embedding")
    config = model.config
    if window := sliding_window(config, plan.index):
        lost.append(f"window of {window} tokens")
    if cap := getattr(config, "attn_logit_softcapping", None):
        lost.append(f"score cap of {cap:g}")
    if dropout := getattr(config, "attention_dropout", None) or getattr(config, "attn_pdrop", None):
        lost.append(f"attention dropout of {dropout:g}")
    if dropout := getattr(getattr(plan.attention, "resid_dropout", None), "p", None):
        lost.append(f"output dropout of {dropout:g}")
    return lost


def swapped_layers(model: nn.Module) -> dict[int, SwappedAttention]:
    """The swapped layers of a model by number, whatever it is wrapped in."""
    return {module.layer_idx: module for module in model.modules() if isinstance(module, SwappedAttention)}


def unswap_attention(model: PreTrainedModel) -> None:
    """Put the attention layers back that `swap_attention(..., keep_teacher=True)` kept; the model is as it was before.

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
    uninstall(model)
