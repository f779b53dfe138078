"""Parameters of the formats: how each is made of ours, and how it is taken apart again."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from deltazoo.compat.native.formats import Format
from deltazoo.models.modeling import DeltaRuleForCausalLM

BLOCK = re.compile(r"model\.layers\.(\d+)\.")
_OUTSIDE_LAYERS = {
    "model.embeddings": "model.embed_tokens",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


class Form(NamedTuple):
    """A pair of functions between one parameter of a format and ours."""

    made: Callable[[Sequence[Tensor], Any], Tensor]
    """Function that makes the format's parameter of ours, in the order of our layers, and of our configuration."""
    apart: Callable[[Tensor, Sequence[int], Any], Sequence[Tensor]]
    """Function that makes ours of the format's parameter, the numbers of rows of ours, and our configuration."""


class Row(NamedTuple):
    """One parameter of a format."""

    ours: list[str]
    form: Form


def parameters_of(config: Any) -> dict[str, Size]:
    """Shapes of the parameters of our model, in the order of its modules; a tied head is left out."""
    with torch.device("meta"):
        state = DeltaRuleForCausalLM(config).state_dict()
    return {name: x.shape for name, x in state.items() if not (config.tie_word_embeddings and name == "lm_head.weight")}


def rows_of(known: Format, config: Any, blocks: Sequence[int]) -> dict[str, Row]:
    """All parameters of a format by name.

    Args:
        blocks: the format's block number for each block of ours.
    """
    rows: dict[str, Row] = {}
    for name in parameters_of(config):
        found = BLOCK.match(name)
        prefix, linear = "", False
        if found is not None:
            index = int(found[1])
            prefix, linear = f"model.layers.{blocks[index]}.", config.layer_types[index] == "linear_attention"
        module = name.removeprefix("" if found is None else found[0]).removesuffix(".weight")
        ending = name[len(name.removesuffix(".weight")) :]
        if module.startswith("attn."):
            inner = module.removeprefix("attn.")
            module = f"{known.layer}.{known.names.get(inner, inner)}" if linear else f"self_attn.{inner}"
        module = _OUTSIDE_LAYERS.get(module, module)
        form = FORMS[known.forms.get(module, "joined")]
        rows.setdefault(prefix + module + ending, Row([], form)).ours.append(name)
    return rows


def _by_key_head(parts: Sequence[Tensor], config: Any) -> Tensor:
    return torch.cat([x.unflatten(0, (config.num_heads, -1)) for x in parts], dim=1).flatten(0, 1)


def _from_key_heads(x: Tensor, rows: Sequence[int], config: Any) -> list[Tensor]:
    parts = x.unflatten(0, (config.num_heads, -1)).split([n // config.num_heads for n in rows], dim=1)
    return [part.flatten(0, 1) for part in parts]


def _beside_gate(parts: Sequence[Tensor], config: Any) -> Tensor:
    queries = parts[0].unflatten(0, (config.num_attention_heads, -1))
    return torch.cat([queries, torch.zeros_like(queries)], dim=1).flatten(0, 1)


def _without_gate(x: Tensor, rows: Sequence[int], config: Any) -> list[Tensor]:
    queries, gate = x.unflatten(0, (config.num_attention_heads, -1)).chunk(2, dim=1)
    if gate.any():
        raise ValueError(
            "softmax layers of this model gate their output, and ours do not: it cannot become one of ours"
        )
    return [queries.flatten(0, 1)]


FORMS: Mapping[str, Form] = {
    "joined": Form(lambda parts, config: torch.cat([*parts]), lambda x, rows, config: x.split([*rows])),
    "by_key_head": Form(_by_key_head, _from_key_heads),
    "per_head": Form(lambda parts, config: parts[0].view(1, 1, -1, 1), lambda x, rows, config: [x.flatten()]),
    # Norms whose factor is their weight plus one.
    "zero_centred": Form(lambda parts, config: parts[0].float() - 1, lambda x, rows, config: [x.float() + 1]),
    # One map of queries and output gate in softmax layers: a gate of zeros halves the output exactly.
    "beside_gate": Form(_beside_gate, _without_gate),
    "doubled": Form(lambda parts, config: parts[0] * 2, lambda x, rows, config: [x / 2]),
}
