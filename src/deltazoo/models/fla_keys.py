"""Configuration keys of fla-hub checkpoints, translated to ours and back.

A `config.json` of fla-hub differs from ours in a few keys: the width of a head is relative to the model, one `attn`
dictionary describes softmax layers, and several keys choose kernels. `translate_fla_config` rewrites such a dictionary,
and refuses values that stand for a model which our layers do not compute. `add_fla_keys` does the reverse, so that
flash-linear-attention loads what we save.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deltazoo.spec import get_rule

# Keys that choose a kernel or a fusion; the model computes the same function with any value.
_KERNEL_CHOICES = frozenset({"attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy"})

# Keys that change the model, with the values that our layers implement.
_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "use_beta": (True,),
    "use_output_norm": (True,),
    "qk_norm": ("l2",),
    "qk_activation": ("silu",),
    "hidden_act": ("silu", "swish"),
    "use_l2warp": (False,),
    "conv_bias": (False,),
    "attnres_block_size": (None,),
    "is_causal": (True,),
    "use_output_correction": (True,),
    "use_inner_decay": (True,),
    "squash_x": (1.5,),
    "squash_eps": (1e-6,),
    "feature_map": (None,),
    "clamp_min": (None,),
    "elementwise_affine": (True,),
    "use_gk": (True,),
    "use_gv": (False,),
}

# Our names of keys that fla-hub has under another name.
_RENAMED: Mapping[str, str] = {
    "use_output_gate": "use_gate",
    "num_householder": "num_micro_steps",
    "lower_bound": "decay_lower_bound",
}

# Keys of the dictionary `attn`, which describes softmax layers, and their names in the configuration.
_SOFTMAX_KEYS: Mapping[str, str] = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "qkv_bias": "qkv_bias",
    "rope_theta": "rope_theta",
}

# Keys of the initial values of a new model, which do not matter to a saved one.
_INITIAL_VALUES = frozenset({"correction_factor", "log_atk_scale_init", "a_log_init_lower"})

# Model types whose head widths are relative to the model's.
_RELATIVE_WIDTHS = ("delta_net", "gla")


def translate_fla_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the keys that only fla-hub uses rewritten as ours; all other keys stay.

    Args:
        values: keys as found in a `config.json` or given by a caller, `mixer` among them.

    Returns:
        A new dictionary in the keys of `DeltaRuleConfig`.

    Raises:
        NotImplementedError: for a value that stands for a different model than our layers compute.
        ValueError: for contradicting keys.
    """
    translated = {key: value for key, value in values.items() if key not in _KERNEL_CHOICES}
    for key, implemented in _IMPLEMENTED.items():
        value = translated.pop(key, implemented[0])
        if value not in implemented:
            raise NotImplementedError(f"{key}={value!r} is not implemented, only {' or '.join(map(repr, implemented))}")
    if translated.get("transformers_version") is not None:
        translated = {key: value for key, value in translated.items() if key not in _INITIAL_VALUES}
    _rename(translated)
    if translated.pop("safe_gate", False) and translated.get("decay_lower_bound") is None:  # its kernels rely on one
        raise ValueError("safe_gate=True needs a bound on the decay: set decay_lower_bound")
    _translate_forget_gate(translated)
    _translate_head_width(translated)
    _check_rule(translated)
    _translate_hybrid_layers(translated)
    return translated


def _rename(values: dict[str, Any]) -> None:
    for theirs, ours in _RENAMED.items():
        value, known = values.pop(theirs, None), values.get(ours)
        if value is None:
            continue
        if known not in (None, value):
            raise ValueError(f"{theirs}={value} and {ours}={known} contradict each other")
        values[ours] = value


def _translate_forget_gate(values: dict[str, Any]) -> None:
    """Turn Gated DeltaProduct without its decay into DeltaNet in several steps with an output gate."""
    decays = values.pop("use_forget_gate", None)
    if decays is None:
        return
    if values["mixer"] == "gated_deltaproduct" and not decays:
        values["mixer"] = "delta_net"
        values["use_gate"] = True if values.get("use_gate") is None else values["use_gate"]
    if decays != (get_rule(values["mixer"]).decay != "none"):
        raise ValueError(f"use_forget_gate={decays} and mixer={values['mixer']!r} contradict each other")


def _check_rule(values: dict[str, Any]) -> None:
    """Refuse two forms that our layers lack: GLA with fewer heads of keys than queries, and another output gate."""
    rule, queries = values["mixer"], values.get("num_heads")
    keys = values.pop("num_kv_heads", None) if rule == "gla" else None
    if keys not in (None, queries):
        raise NotImplementedError(f"num_kv_heads={keys} is not implemented, only num_heads={queries}")
    activation, implemented = values.pop("output_gate_activation", None), get_rule(rule).gate_activation
    if {"swish": "silu"}.get(activation, activation) not in (None, implemented):
        raise NotImplementedError(
            f"output_gate_activation={activation!r} is not implemented for {rule}, only {implemented!r}"
        )


def _translate_head_width(values: dict[str, Any]) -> None:
    """Turn `expand_k` and `expand_v` of fla-hub, which DeltaNet and GLA relate to the hidden size, into head sizes."""
    expand_k = values.pop("expand_k", None)
    if expand_k is None:
        return
    if values.get("head_dim") is not None:
        raise ValueError("give either head_dim or expand_k, not both")
    missing = [key for key in ("hidden_size", "num_heads") if values.get(key) is None]
    if missing:
        raise ValueError(f"expand_k={expand_k} needs {' and '.join(missing)} to be given as well")
    values["head_dim"] = _channels_per_head(values, "expand_k", expand_k)
    values["expand_v"] = _channels_per_head(values, "expand_v", values.get("expand_v") or 1) / values["head_dim"]


def _channels_per_head(values: Mapping[str, Any], name: str, ratio: float) -> int:
    channels = values["hidden_size"] * ratio / values["num_heads"]
    if round(channels) < 1 or not math.isclose(channels, round(channels), rel_tol=1e-6):
        raise ValueError(
            f"hidden_size * {name} must be a multiple of num_heads, got {values['hidden_size']} * {ratio} and "
            f"{values['num_heads']}"
        )
    return round(channels)


def _translate_hybrid_layers(values: dict[str, Any]) -> None:
    """Turn `attn={"layers": [...], "num_heads": ...}` into `layer_types` and the keys of the softmax layers."""
    attn = values.pop("attn", None)
    if attn is None:
        return
    attn = _one_specification(attn)
    if attn.pop("window_size", None) is not None:
        raise NotImplementedError("sliding-window softmax layers (attn['window_size']) are not implemented")
    if attn.pop("qk_norm", False):
        raise NotImplementedError("normalised queries and keys in softmax layers (attn['qk_norm']) are not implemented")
    layers, num_layers = attn.pop("layers"), values.get("num_hidden_layers")
    if num_layers is None:
        raise ValueError("attn={...} needs num_hidden_layers to be given as well")
    if not all(type(index) is int and 0 <= index < num_layers for index in layers):
        raise ValueError(f"attn['layers'] must be numbers from 0 to {num_layers - 1}, got {layers}")
    layer_types = ["full_attention" if index in layers else "linear_attention" for index in range(num_layers)]
    translated = {ours: attn.pop(theirs, None) for theirs, ours in _SOFTMAX_KEYS.items()}
    if attn:
        raise ValueError(f"unknown keys in attn: {', '.join(map(repr, attn))}")
    if values.get("layer_types") not in (None, layer_types):
        raise ValueError(
            f"attn and layer_types place the softmax layers differently: {layers}, {values['layer_types']}"
        )
    values["layer_types"] = layer_types
    known = {**(values.get("rope_parameters") or {}), **values}
    for key, value in translated.items():
        if value is None:
            continue
        if known.get(key) not in (None, False, value):  # False: the default of qkv_bias
            raise ValueError(f"attn says {key}={value}, which contradicts {key}={known[key]}")
        values[key] = value


def _one_specification(attn: Mapping[str, Any] | list[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of all softmax layers; a list that gives some of them other settings is refused."""
    parts = attn if isinstance(attn, list) else [attn]
    if not parts or not all(map(_is_specification, parts)):
        raise ValueError(f'attn must be like {{"layers": [1, 3], "num_heads": 8}}, or a list of such, got {attn!r}')
    first, *others = map(dict, parts)
    layers = list(first.pop("layers"))
    for other in others:
        layers += other.pop("layers")
        if other != first:
            raise NotImplementedError(f"softmax layers that differ (attn) are not implemented, got {first} and {other}")
    return {**first, "layers": layers}


def _is_specification(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("layers"), Sequence) and part.get("num_heads") is not None


def add_fla_keys(values: dict[str, Any]) -> dict[str, Any]:
    """A configuration of ours with the further keys that fla-hub's classes need to build the same model.

    `translate_fla_config` takes the result as well.
    """
    values = dict(values)
    if values["model_type"] in _RELATIVE_WIDTHS and values["num_v_heads"] == values["num_heads"]:
        head_dim = values.pop("head_dim")
        values["expand_k"] = values["num_heads"] * head_dim / values["hidden_size"]
        values["expand_v"] = values["num_heads"] * round(head_dim * values["expand_v"]) / values["hidden_size"]
    if "full_attention" in values["layer_types"]:
        values["attn"] = {
            "layers": [i for i, layer_type in enumerate(values["layer_types"]) if layer_type == "full_attention"],
            "num_heads": values["num_attention_heads"],
            "num_kv_heads": values["num_key_value_heads"],
            "qkv_bias": values["qkv_bias"],
            "window_size": None,
            "rope_theta": values["rope_parameters"]["rope_theta"],
        }
    if values["model_type"] in ("comba", "gated_deltaproduct", "gla"):
        values["use_output_gate"] = values["use_gate"]
    if values["model_type"] == "gated_deltaproduct":
        values["num_householder"] = values["num_micro_steps"]
        values["use_forget_gate"] = get_rule(values["mixer"]).decay != "none"
    if values["model_type"] in ("kda", "precond_kda") and values["decay_lower_bound"] is not None:
        values["lower_bound"] = values["decay_lower_bound"]
        values["safe_gate"] = values["lower_bound"] >= -5  # fla's kernels rely on the bound in this range
    return values
