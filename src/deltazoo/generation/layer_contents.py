"""What one layer of a cache holds, read and written by the kind of the layer.

Three kinds, which saved files name: "delta_rule", our own layers; "linear", transformers' layer with a convolution
window and a recurrent state, which accelerated models keep; "softmax", keys and values, growing or static.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, StaticLayer

from deltazoo.generation.cache import DeltaRuleCacheLayer, RowKeyValues
from deltazoo.layers.state import LayerState

__all__ = [
    "Tensors",
    "detach_contents",
    "fill",
    "fill_rows",
    "kind_of",
    "num_rows_of",
    "tensors_of",
    "tokens_of",
    "why_not_fill",
]

Tensors = Mapping[str, Tensor]
"""Of one layer by name, rows of the batch first; empty before its first token. "conv", "recurrent" and "auxiliary" as
in `LayerState`; "keys" and "values" `[N, H, L, D]`, the last L tokens."""

_STATES = ("conv", "recurrent", "auxiliary")
KINDS: Mapping[type[Any], str] = {
    DeltaRuleCacheLayer: "delta_rule",
    LinearAttentionLayer: "linear",
    DynamicLayer: "softmax",
    DynamicSlidingWindowLayer: "softmax",
    StaticLayer: "softmax",
    RowKeyValues: "softmax",
}
"""By exact class: a subclass may hold more."""


def kind_of(layer: Any) -> str:
    """The kind of a cache layer; ValueError for one that is not known here."""
    kind = KINDS.get(type(layer))
    if kind is None or getattr(layer, "number_of_states", 1) != 1:
        known = ", ".join(cls.__name__ for cls in KINDS)
        raise ValueError(f"the contents of a {type(layer).__name__} cannot be taken out of a cache; known: {known}")
    return kind


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """The tensors of a layer, no copies."""
    kind = kind_of(layer)
    if kind == "delta_rule":
        state = layer.state or ()
        return {name: x for name, x in zip(_STATES, state, strict=bool(state)) if x is not None}
    if kind == "linear":
        if not layer.has_previous_state[0]:
            return {}
        return {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]}
    if not layer.is_initialized:
        return {}
    held = tokens_of(layer) if isinstance(layer, StaticLayer) else layer.keys.shape[2]
    return {"keys": layer.keys[:, :, :held], "values": layer.values[:, :, :held]}


def tokens_of(layer: Any) -> int:
    """Tokens that a layer has seen; 0 for "linear" layers, which do not count. Waits for the device if it is static."""
    return 0 if kind_of(layer) == "linear" else int(layer.get_seq_length())


def num_rows_of(tensors: Tensors) -> int | None:
    """Rows of the batch; None for a layer that holds nothing."""
    return next((len(x) for x in tensors.values()), None)


def why_not_fill(layer: Any, kind: str, tensors: Tensors, num_tokens: int, *, rows_only: bool) -> str | None:
    """Why `fill`, or with `rows_only` `fill_rows`, cannot write tensors to a layer; None if it can."""
    if kind_of(layer) != kind:
        return f"a {kind} layer's contents do not fit a {type(layer).__name__}"
    held = tensors_of(layer)
    if rows_only and held.keys() != tensors.keys():
        return f"rows of {_names(tensors)} cannot join {_names(held)}"
    for name in held.keys() & tensors.keys():
        new, old = tensors[name], held[name]
        sizes = [[*x.shape[1:2], *x.shape[3:]] if kind == "softmax" else [*x.shape[1:]] for x in (new, old)]
        if sizes[0] != sizes[1] or new.dtype != old.dtype:
            return f"{name} of shape {tuple(new.shape)}, {new.dtype}, meets shape {tuple(old.shape)}, {old.dtype}"
        if _is_static(layer) and not rows_only and len(new) != len(old):
            return f"{len(new)} rows cannot take the place of {len(old)} at fixed addresses"
    if kind == "softmax" and rows_only and num_tokens > tokens_of(layer):
        return (
            f"a row of {num_tokens} tokens cannot join a batch of {tokens_of(layer)}: softmax layers align rows at the "
            "last token"
        )
    if isinstance(layer, StaticLayer) and num_tokens > layer.max_cache_len:
        return f"{num_tokens} tokens do not fit max_cache_len={layer.max_cache_len}"
    if type(layer) is DynamicLayer and tensors and tensors["keys"].shape[2] != num_tokens and not rows_only:
        return f"a window of {tensors['keys'].shape[2]} of {num_tokens} tokens does not fit a layer that keeps all"
    return None


def _is_static(layer: Any) -> bool:
    """Whether tensors stay at their addresses."""
    return isinstance(layer, StaticLayer) or (isinstance(layer, DeltaRuleCacheLayer) and layer.static)


def _names(tensors: Tensors) -> str:
    return " and ".join(tensors) or "nothing"


def fill(layer: Any, tensors: Tensors, num_tokens: int, others: Iterable[Any]) -> None:
    """Copy tensors to an empty layer; a static layer keeps its addresses.

    Args:
        layer: for which `why_not_fill` gives no reason, after its `reset`.
        tensors: the new contents, on the layer's device if it holds something.
        num_tokens: that they are the state of.
        others: all layers of the cache.
    """
    kind = kind_of(layer)
    if kind == "delta_rule":
        if tensors:
            layer.store(_delta_state({name: x.clone() for name, x in tensors.items()}), num_tokens, others)
    elif kind == "linear":
        _fill_linear(layer, tensors)
    else:
        _fill_softmax(layer, tensors, num_tokens)


def _delta_state(tensors: Tensors) -> LayerState:
    return LayerState(*map(tensors.get, _STATES))  # type: ignore[arg-type]


def _fill_linear(layer: Any, tensors: Tensors) -> None:
    if not tensors:
        return
    conv, recurrent = tensors["conv"], tensors["recurrent"]
    if layer.is_recurrent_states_initialized[0] and layer.recurrent_states[0].shape != recurrent.shape:
        layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = False  # another batch
    layer.update_conv_state(conv.clone(), conv_kernel_size=conv.shape[-1])
    layer.update_recurrent_state(recurrent)


def _fill_softmax(layer: Any, tensors: Tensors, num_tokens: int) -> None:
    if not isinstance(layer, StaticLayer):  # older versions of transformers leave zeros behind at a reset
        layer.keys = layer.values = None
        layer.is_initialized = False
    if not tensors:
        return
    # A window holds the last keys alone; they get the positions that they have among all keys.
    before = num_tokens - tensors["keys"].shape[2]
    if isinstance(layer, StaticLayer):
        if not layer.is_initialized:
            layer.lazy_initialization(tensors["keys"], tensors["values"])
        layer.cumulative_length.fill_(before)
    elif isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = before
    layer.update(tensors["keys"], tensors["values"])


def fill_rows(layer: Any, tensors: Tensors, rows: Tensor) -> None:
    """Replace some rows `[N]` of what a layer holds; a static layer keeps its addresses.

    Softmax layers align rows at the last token, as in a batch with padding on the left: a row with fewer tokens than
    the batch has zeros before them, which the caller's mask must hide.
    """
    for name, held in tensors_of(layer).items():
        new = tensors[name]
        if kind_of(layer) == "softmax":
            new = F.pad(new, (0, 0, held.shape[2] - new.shape[2], 0))
        if _is_static(layer) or kind_of(layer) == "linear":
            held.index_copy_(0, rows, new)
        else:
            _replace(layer, name, held.index_copy(0, rows, new))


def detach_contents(layer: Any) -> None:
    """Replace tensors that carry gradients by ones that carry none, over the same memory."""
    kind_of(layer)  # another kind may keep tensors elsewhere
    for held in (vars(layer), getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        for name, x in held.items():
            if isinstance(x, Tensor) and x.requires_grad:
                held[name] = x.detach()


def _replace(layer: Any, name: str, x: Tensor) -> None:
    if isinstance(layer, DeltaRuleCacheLayer):
        layer.store(layer.state._replace(**{name: x}), 0)  # type: ignore[union-attr]
    else:
        setattr(layer, name, x)
