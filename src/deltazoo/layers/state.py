"""The state that a layer carries from one call to the next, and a plain container for the states of several layers."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class LayerState(NamedTuple):
    """The state of one layer. Its size does not grow with the number of tokens before."""

    conv: Tensor | None
    """`[N, C, conv_size - 1]`: the last inputs of the short convolutions of q, k and v, concatenated; None without."""
    recurrent: Tensor
    """`[N, HV, K, V]` float32: the state of the recurrence."""
    auxiliary: Tensor | None = None
    """`[N, ...]` float32: a further state that the rule itself keeps; None for rules without."""

    def rows(self, rows: Tensor) -> "LayerState":
        """The state of the given rows `[M]` of the batch."""
        return LayerState(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]

    def detach(self) -> "LayerState":
        """The state without the graph that computed it; no tensor is copied."""
        return LayerState(*(None if x is None else x.detach() for x in self))  # type: ignore[arg-type]


class StateStore(Protocol):
    """The interface of `past_key_values`, as layers use it."""

    fixed: bool
    """Whether states stay at their addresses, so that a step may overwrite them in place."""

    def get_state(self, layer_idx: int) -> LayerState | None:
        """The layer's state, or None before its first token."""

    def set_state(self, layer_idx: int, state: LayerState, num_new_tokens: int) -> None:
        """Keep the layer's state after `num_new_tokens` further tokens."""


class LayerStates:
    """The states of several layers, kept in a dict: a `past_key_values` that needs nothing but torch."""

    fixed = False

    def __init__(self) -> None:
        self.states: dict[int, LayerState] = {}
        self.num_tokens: dict[int, int] = {}

    def get_state(self, layer_idx: int) -> LayerState | None:
        """The layer's state, or None before its first token."""
        return self.states.get(layer_idx)

    def set_state(self, layer_idx: int, state: LayerState, num_new_tokens: int) -> None:
        """Keep the layer's state after `num_new_tokens` further tokens (padded ones count)."""
        self.states[layer_idx] = state
        self.num_tokens[layer_idx] = self.num_tokens.get(layer_idx, 0) + num_new_tokens

    def select(self, rows: Tensor) -> "LayerStates":
        """A copy that holds the given rows `[M]` of the batch, for beam search or for dropping finished rows."""
        chosen = self.snapshot()
        chosen.states = {layer_idx: state.rows(rows) for layer_idx, state in self.states.items()}
        return chosen

    def detach(self) -> "LayerStates":
        """A copy through which no gradient flows to the tokens so far, for truncated backpropagation through time."""
        copy = self.snapshot()
        copy.states = {layer_idx: state.detach() for layer_idx, state in self.states.items()}
        return copy

    def snapshot(self) -> "LayerStates":
        """A copy to return to later; it copies no tensor, since layers never write into a state they were given."""
        copy = LayerStates()
        copy.states, copy.num_tokens = dict(self.states), dict(self.num_tokens)
        return copy


class StateAccess:
    """The states that one call of a layer reads from its `past_key_values` and writes back.

    Args:
        store: the `past_key_values`; None: the call starts from zeros, and its states are not kept.
        layer_idx: the layer's number.

    Raises:
        TypeError: `store` is no `StateStore`.
        ValueError: there is a store, and the layer has no number.
    """

    def __init__(self, store: StateStore | None, layer_idx: int | None) -> None:
        self.conv: Tensor | None = None
        self.recurrent: Tensor | None = None
        self.auxiliary: Tensor | None = None
        self.wanted = store is not None
        """Whether the call keeps its states."""
        self.in_place = False
        """Whether a decoding step may overwrite the states in place."""
        if store is None:
            return
        if not (hasattr(store, "get_state") and hasattr(store, "set_state")):
            raise TypeError(
                "past_key_values must hold states as deltazoo.LayerStates() does (get_state and set_state), "
                f"got {type(store).__name__}"
            )
        if layer_idx is None:
            raise ValueError("past_key_values needs to know which layer asks: construct the layer with layer_idx")
        self._store: Any = store
        self._layer_idx = layer_idx
        self.in_place = store.fixed
        before = store.get_state(layer_idx)
        if before is not None:
            self.conv, self.recurrent, self.auxiliary = before

    def keep(
        self, conv: Tensor | None, recurrent: Tensor, auxiliary: Tensor | None = None, *, num_new_tokens: int
    ) -> None:
        """Store the states after `num_new_tokens` further tokens, if they are wanted."""
        if self.wanted:
            self._store.set_state(self._layer_idx, LayerState(conv, recurrent, auxiliary), num_new_tokens)


def meta_state(layer: Any) -> LayerState:
    """The state of one sequence, without values: what a layer on the meta device makes of one token."""
    states = LayerStates()
    with torch.no_grad():
        layer(layer.q_proj.weight.new_zeros(1, 1, layer.hidden_size), past_key_values=states)
    return states.states[layer.layer_idx]


def is_decoding_step(x: Tensor) -> bool:
    """Whether `[B, T, ...]` is one token per row without gradients.

    The number of operations then takes the time, not their size, so layers join small operations into one.
    """
    return x.shape[1] == 1 and not torch.is_grad_enabled()
