"""`load_native_checkpoint`: a checkpoint of transformers' own delta-rule models as a model of ours."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deltazoo.compat.fla.checkpoints import model_of_weights, read_weights, refuse_missing_weights
from deltazoo.compat.native.formats import FORMATS, Format, native_values, needs_of
from deltazoo.compat.native.forms import BLOCK, parameters_of, rows_of
from deltazoo.models.configuration import DeltaRuleConfig
from deltazoo.models.hub import config_class_of
from deltazoo.models.modeling import DeltaRuleForCausalLM
from deltazoo.spec import get_rule

__all__ = ["load_native_checkpoint"]


def load_native_checkpoint(path: str | Path, **kwargs: Any) -> DeltaRuleForCausalLM:
    """A causal language model of ours from a checkpoint of a model type that `deltazoo.export` writes.

    A checkpoint from any source loads if our layers compute all of it: one that `export` has written, or one without
    softmax layers. A block of zeros is left out. The model gets the rule's own model type.

    Args:
        path: a directory with `config.json` and safetensors files.
        kwargs: arguments of `from_pretrained`, such as `dtype`.

    Raises:
        ValueError: another model type, parts that our layers do not compute, missing files or weights.
    """
    path = Path(path)
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    target = values.get("model_type")
    if target not in FORMATS:
        raise ValueError(f"model type {target!r} in {path} is none of {', '.join(FORMATS)}")
    if target not in CONFIG_MAPPING:
        raise ValueError(f"transformers {transformers.__version__}, which is installed, has no model type {target}")
    known, theirs = FORMATS[target], CONFIG_MAPPING[target].from_dict(values)
    state = {_current_name(name, known): x for name, x in read_weights(path).items()}
    blocks = [n for n in range(theirs.num_hidden_layers) if not _adds_nothing(state, n, theirs.layer_types[n])]
    state = {name: x for name, x in state.items() if _block_of(name) in (None, *blocks)}
    config = _our_config(known, theirs, [theirs.layer_types[n] for n in blocks])
    rows, shapes = rows_of(known, config, blocks), parameters_of(config)
    refuse_missing_weights(rows.keys() - state.keys(), path)
    if further := sorted(state.keys() - rows.keys() - {"lm_head.weight"}):
        raise ValueError(f"our layers do not compute all of this {target}: {path} holds {', '.join(further[:5])}")
    ours: dict[str, Tensor] = {}
    for name, row in rows.items():
        ours |= zip(row.ours, row.form.apart(state[name], [shapes[part][0] for part in row.ours], config), strict=True)
    return model_of_weights(config, ours, path, **kwargs)


def _current_name(name: str, known: Format) -> str:
    for part, meant in known.also_named.items():
        name = name.replace(part, meant)
    return name


def _block_of(name: str) -> int | None:
    found = BLOCK.match(name)
    return None if found is None else int(found[1])


def _adds_nothing(state: Mapping[str, Tensor], block: int, layer_type: str) -> bool:
    """Whether a block is one of zeros with a softmax layer, such as `export` appends."""
    return layer_type == "full_attention" and not any(x.any() for name, x in state.items() if _block_of(name) == block)


def _our_config(known: Format, theirs: Any, layer_types: list[str]) -> DeltaRuleConfig:
    """Our configuration of a model, in the model type of the rule.

    Raises:
        ValueError: the configuration says something that our layers do not compute.
    """
    target, hybrid = theirs.model_type, "full_attention" in layer_types
    if hybrid and known.no_hybrids is not None:
        raise ValueError(f"our layers do not compute the softmax layers of {target}: {known.no_hybrids}")
    needs = needs_of(target, hybrid=hybrid)
    values = {need.key: need.value for need in needs if not isinstance(need.value, str)}
    values |= {ours: getattr(theirs, name) for name, ours in known.keys.items()}
    values["expand_v"] = getattr(theirs, "linear_value_head_dim", values["head_dim"]) / values["head_dim"]
    values |= {"layer_types": layer_types, "num_hidden_layers": len(layer_types), "dtype": theirs.dtype}
    if hybrid:
        values |= {key: getattr(theirs, key) for key in ("num_attention_heads", "num_key_value_heads")}
        rope = {key: value for key, value in theirs.rope_parameters.items() if not key.startswith("mrope")}
        values["rope_parameters"] = rope
    config = config_class_of(get_rule(known.rules[0]).hub_model_type, Path())(**values)

    computed = native_values(target, config)
    for name in (*known.constants, *(("head_dim",) if hybrid else ())):
        if (found := getattr(theirs, name, computed[name])) != computed[name]:
            raise ValueError(f"our layers do not compute {target} with {name}={found!r}, only with {computed[name]!r}")
    for need in needs:
        if (value := getattr(config, need.key)) != need.wanted(config):
            raise ValueError(f"our layers do not compute {target} with {need.key}={value!r}: {need.reason}")
    return config
