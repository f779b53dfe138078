"""Checks that a model's attention can be swapped; every refusal says what prevents it and what to do."""

from collections import defaultdict

from torch import nn
from transformers import PreTrainedModel

from deltazoo.swap.families import ModelFamily, decoder_layers_of, family_of
from deltazoo.swap.swapped_attention import SwappedAttention
from deltazoo.swap.swapped_models import SwappedModel, original_classes

__all__ = ["check_model"]


def check_model(model: nn.Module) -> ModelFamily:
    """The entry of `FAMILIES` for a model that can be swapped.

    Raises:
        TypeError: not a transformers model.
        ValueError: an unknown family, encoder-decoders and cross-attention, attention that looks ahead, models swapped
            before, quantised models, layers that share their attention.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a transformers model, got {type(model).__name__}; of a wrapped model (PEFT, DDP, compiled) pass "
            "the model inside"
        )
    if isinstance(model, SwappedModel):
        swapped = [module for module in model.modules() if isinstance(module, SwappedAttention)]
        kept = all(layer.teacher is not None for layer in swapped)
        first = "call unswap_attention" if kept else "start from the original model"
        raise ValueError(
            f"{type(model).__name__} is swapped already: {first}, then name all layers to be swapped in one call"
        )
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; only decoders can be swapped")
    family = family_of(config)
    known = list(original_classes(type(config)).values())
    if type(model) not in known:
        raise ValueError(
            f"{type(model).__name__} is no class that Auto classes load for {family.model_type!r}: "
            f"{', '.join(cls.__name__ for cls in known)}"
        )
    if getattr(config, "add_cross_attention", False):
        raise ValueError("the model has cross-attention (config.add_cross_attention); only decoders can be swapped")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError("the model's attention looks ahead (config.use_bidirectional_attention); a recurrence cannot")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("the model is quantised; swap the unquantised model, then quantise")
    _check_unshared(model, family)
    return family


def _check_unshared(model: PreTrainedModel, family: ModelFamily) -> None:
    """Refuse layers that share weights: a swapped one would get a copy while the other keeps the original."""
    owners = defaultdict(list)
    for index, decoder_layer in enumerate(decoder_layers_of(model, family)):
        attention = decoder_layer.get_submodule(family.attention)
        for parameter in {id(p): p for p in attention.parameters()}.values():
            owners[id(parameter)].append(index)
    shared = sorted({tuple(layers) for layers in owners.values() if len(layers) > 1})
    if shared:
        raise ValueError(f"layers {list(shared[0])} share attention weights; give each layer weights of its own first")
