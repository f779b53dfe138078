"""The model families whose attention can be swapped: a table of data, one entry per family.

An entry says where attention is in a transformers model, how it stores its projections and how it is called. Head
counts and widths are read from the model at hand. To add a family, add an entry to `FAMILIES` and a tiny configuration
to `tests/tiny_families.py`: the tests run over the whole table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """One family of transformers models; the defaults fit Llama."""

    model_type: str
    layers: str = "layers"
    """Path of the list of decoder layers in the base model."""
    attention: str = "self_attn"
    """Name of the attention module in a decoder layer."""
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Names of the query, key and value projections, or name of one projection that holds all three."""
    fused: Literal["stacked", "by_head"] | None = None
    """Order of rows in a projection that holds all three: queries, keys, values ("stacked"), or head by head."""
    transposed: bool = False
    """Whether weights are `[in, out]` (transformers' Conv1D) instead of `[out, in]` (nn.Linear)."""
    output: str = "o_proj"
    """Name of the output projection."""
    norms: tuple[str, str] | None = None
    """Names of the norms of queries and keys, before rotary embedding; their size tells whether they act on each head
    or on all."""
    norm_offset: float = 0.0
    """Number that these norms add to their weight (Gemma: 1)."""
    input_norm: str | None = "input_layernorm"
    """Name of the norm before attention in a decoder layer; None where attention reads the residual stream itself."""
    rope: bool = True
    """Whether queries and keys get rotary embeddings."""
    rope_switch: str | None = None
    """Attribute of the attention module that says whether the layer has rotary embeddings; None: as `rope` says."""
    cache_argument: str | None = None
    """Name of the argument by which the decoder layer passes its cache to attention; None: transformers' usual name."""


_QUERY_KEY_NORMS = ("q_norm", "k_norm")

FAMILIES: Mapping[str, ModelFamily] = {
    family.model_type: family
    for family in (
        ModelFamily(model_type="llama"),
        ModelFamily(model_type="mistral"),
        ModelFamily(model_type="qwen2"),
        ModelFamily(model_type="qwen3", norms=_QUERY_KEY_NORMS),
        ModelFamily(model_type="gemma2"),
        ModelFamily(model_type="gemma3_text", norms=_QUERY_KEY_NORMS, norm_offset=1.0),
        ModelFamily(model_type="phi3", projections=("qkv_proj",), fused="stacked"),
        ModelFamily(
            model_type="gpt_neox",
            attention="attention",
            projections=("query_key_value",),
            fused="by_head",
            output="dense",
            cache_argument="layer_past",
        ),
        ModelFamily(
            model_type="gpt2",
            layers="h",
            attention="attn",
            projections=("c_attn",),
            fused="stacked",
            transposed=True,
            output="c_proj",
            rope=False,
            input_norm="ln_1",
        ),
        ModelFamily(model_type="olmo2", norms=_QUERY_KEY_NORMS, input_norm=None),
        ModelFamily(model_type="smollm3", rope_switch="use_rope"),
        ModelFamily(model_type="granite"),
        ModelFamily(model_type="mixtral"),
        ModelFamily(model_type="qwen3_moe", norms=_QUERY_KEY_NORMS),
    )
}
"""Families by transformers' `model_type`."""


def family_of(config: PreTrainedConfig) -> ModelFamily:
    """The entry for a model's configuration.

    Raises:
        ValueError: an unknown family; the message lists the known ones.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"attention of model type {config.model_type!r} cannot be swapped; known families: {', '.join(FAMILIES)}. "
            "A family is one entry in deltazoo.swap.families.FAMILIES"
        )
    return family


def decoder_layers_of(model: PreTrainedModel, family: ModelFamily) -> list[nn.Module]:
    """Decoder layers of a model (base model or with a head), in order; each has its attention at `family.attention`."""
    layers = model.base_model.get_submodule(family.layers)
    assert isinstance(layers, nn.ModuleList)
    return list(layers)
