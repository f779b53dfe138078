"""Configuration keys and parameter names of fla-hub checkpoints, translated to ours and back.

The parameter names of today's fla-hub checkpoints are the names used here, so weights travel as they are. Their
`config.json` says a few things differently: the width of a head is given relative to the model, hybrid layers come as
one `attn` dictionary, and several keys choose kernels. `translate_fla_config` rewrites such a dictionary; what would
change the model and cannot be expressed here is refused by name. `add_fla_keys` goes the other way, so that what we
save loads there. `modernize_state_dict` knows the names of older checkpoints.
"""

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deltazoo.runtime import RUNTIME_OPTIONS
from deltazoo.spec import get_variant

__all__ = ["add_fla_keys", "modernize_state_dict", "translate_fla_config", "without_runtime_options"]

# They pick a kernel or a fusion; the model computes the same function whatever they say.
_KERNEL_CHOICES = frozenset({"attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy"})

# Keys that do change the model, with the values that our layers implement.
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
}


def without_runtime_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` without the runtime options that older versions wrote into it; warns if it had any."""
    found = [key for key in RUNTIME_OPTIONS if key in values]
    if found:
        listed = ", ".join(f"{key}={values[key]!r}" for key in found)
        warnings.warn(
            f"the configuration holds {listed}, which say how a model runs, not what it is. They are ignored, and left "
            "out when the model is saved again; pass them to from_pretrained or model.set_runtime instead",
            stacklevel=2,
        )
    return {key: value for key, value in values.items() if key not in found}


def translate_fla_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite configuration keys that only fla-hub uses; all other keys pass through unchanged.

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
    _translate_head_width(translated)
    _translate_decay_bound(translated)
    _check_gate_activation(translated)
    _translate_hybrid_layers(translated)
    return translated


def _translate_decay_bound(values: dict[str, Any]) -> None:
    """`lower_bound` is our `decay_lower_bound`; `safe_gate` picks kernels that rely on it."""
    bound, safe = values.pop("lower_bound", None), values.pop("safe_gate", False)
    ours = values.get("decay_lower_bound")
    if bound is not None and ours not in (None, bound):
        raise ValueError(f"lower_bound={bound} and decay_lower_bound={ours} contradict each other")
    if bound is not None:
        values["decay_lower_bound"] = bound
    elif safe and ours is None:
        raise ValueError("safe_gate=True needs a bound on the decay: set decay_lower_bound")


def _check_gate_activation(values: dict[str, Any]) -> None:
    activation = values.pop("output_gate_activation", None)
    if activation is None:
        return
    implemented = get_variant(values["mixer"]).gate_activation
    if {"swish": "silu"}.get(activation, activation) != implemented:
        raise NotImplementedError(
            f"output_gate_activation={activation!r} is not implemented for {values['mixer']}, only {implemented!r}"
        )


def _translate_head_width(values: dict[str, Any]) -> None:
    """`expand_k` makes both ratios relative to the hidden size (fla-hub's DeltaNet); ours are relative to a head."""
    expand_k = values.pop("expand_k", None)
    if expand_k is None:
        return
    if values.get("head_dim") is not None:
        raise ValueError("give either head_dim or expand_k, not both")
    missing = [key for key in ("hidden_size", "num_heads") if values.get(key) is None]
    if missing:
        raise ValueError(f"expand_k={expand_k} needs {' and '.join(missing)} to be given as well")
    head_dim, value_dim = (
        _channels_per_head(values, name, ratio)
        for name, ratio in (("expand_k", expand_k), ("expand_v", values.get("expand_v") or 1))
    )
    values["head_dim"] = head_dim
    values["expand_v"] = value_dim / head_dim


def _channels_per_head(values: Mapping[str, Any], name: str, ratio: float) -> int:
    channels = values["hidden_size"] * ratio / values["num_heads"]
    if round(channels) < 1 or not math.isclose(channels, round(channels), rel_tol=1e-6):
        raise ValueError(
            f"hidden_size * {name} must be a multiple of num_heads, got {values['hidden_size']} * {ratio} and "
            f"{values['num_heads']}"
        )
    return round(channels)


def _translate_hybrid_layers(values: dict[str, Any]) -> None:
    """`attn={"layers": [...], "num_heads": ...}` becomes `layer_types` and the keys of the softmax layers."""
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
    layer_types = ["full_attention" if index in layers else "linear_attention" for index in range(num_layers)]
    heads = attn.pop("num_heads")
    translated = {
        "layer_types": layer_types,
        "num_attention_heads": heads,
        "num_key_value_heads": attn.pop("num_kv_heads", None) or heads,
        "qkv_bias": attn.pop("qkv_bias", False),
        "rope_parameters": {"rope_type": "default", "rope_theta": attn.pop("rope_theta", 10000.0)},
    }
    if attn:
        raise ValueError(f"unknown keys in attn: {', '.join(map(repr, attn))}")
    if values.get("layer_types") is None:
        values |= translated
    elif values["layer_types"] != layer_types:
        raise ValueError(
            f"attn and layer_types place the softmax layers differently: {layers}, {values['layer_types']}"
        )


def _one_specification(attn: Mapping[str, Any] | list[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of all softmax layers; a list may give some of them settings of their own, which is refused."""
    first, *others = [dict(part) for part in (attn if isinstance(attn, list) else [attn])]
    layers = list(first.pop("layers"))
    for other in others:
        layers += other.pop("layers")
        if other != first:
            raise NotImplementedError(f"softmax layers that differ (attn) are not implemented, got {first} and {other}")
    return {**first, "layers": sorted(layers)}


def add_fla_keys(values: dict[str, Any]) -> dict[str, Any]:
    """What fla-hub's classes need besides our keys to build the same model; `values` is one of our configurations.

    `translate_fla_config` takes the result as well.
    """
    values = dict(values)
    if values["model_type"] == "delta_net" and values["num_v_heads"] == values["num_heads"]:
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
    if values["model_type"] == "kda" and values["decay_lower_bound"] is not None:
        values["lower_bound"] = values["decay_lower_bound"]
        values["safe_gate"] = values["lower_bound"] >= -5  # the range in which its kernels rely on the bound
    return values


# Names that older fla-hub checkpoints and Moonshot's Kimi Linear use for parameters of a mixer.
_OLD_NAMES = (
    (re.compile(r"\.attn\.norm\.weight$"), ".attn.o_norm.weight"),
    (re.compile(r"\.attn\.([fg])_a_proj\."), r".attn.\1_proj.0."),
    (re.compile(r"\.attn\.([fg])_b_proj\."), r".attn.\1_proj.1."),
)
_GATE_AND_UP = re.compile(r"\.mlp\.gate_proj\.weight$")


def modernize_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of an older fla-hub checkpoint under the names of today; those of a current one pass unchanged.

    Older ones call the output norm `norm`, keep the MLP's gate and up projections in one matrix, carry a parameter `D`
    that nothing read, give `A_log` axes of length one, and name the two halves of a low-rank projection `*_a`, `*_b`.
    """
    modern: dict[str, Tensor] = {}
    for name, x in state.items():
        for pattern, replacement in _OLD_NAMES:
            name = pattern.sub(replacement, name)
        up = _GATE_AND_UP.sub(".mlp.up_proj.weight", name)
        if name.endswith(".attn.D"):
            continue
        if name.endswith(".attn.A_log"):
            modern[name] = x.flatten()
        elif up != name and up not in state:
            modern[name], modern[up] = x.chunk(2)
        else:
            modern[name] = x
    return modern
