"""What a mixer carries from one call to the next, and a plain container for it."""

from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["LayerStates", "MixerState", "StateStore"]


class MixerState(NamedTuple):
    """The whole past of one layer, in a size that does not grow with its length."""

    conv: Tensor | None
    """`[N, C, conv_size - 1]`: the last inputs of the short convolutions of q, k and v, concatenated; None without."""
    recurrent: Tensor
    """`[N, HV, K, V]` float32: the state of the recurrence."""


class StateStore(Protocol):
    """What a layer asks of `past_key_values`."""

    fixed: bool
    """Whether states stay at their addresses, so that a step may write the recurrent one where it lies."""

    def get_state(self, layer_idx: int) -> MixerState | None:
        """The layer's state, or None before its first token."""

    def set_state(self, layer_idx: int, state: MixerState, num_new_tokens: int) -> None:
        """Keep the layer's state after `num_new_tokens` further tokens."""


class LayerStates:
    """The states of several layers, kept in a dict: a `past_key_values` that needs nothing but torch."""

    fixed = False

    def __init__(self) -> None:
        self.states: dict[int, MixerState] = {}
        self.num_tokens: dict[int, int] = {}

    def get_state(self, layer_idx: int) -> MixerState | None:
        """The layer's state, or None before its first token."""
        return self.states.get(layer_idx)

    def set_state(self, layer_idx: int, state: MixerState, num_new_tokens: int) -> None:
        """Keep the layer's state after `num_new_tokens` further tokens (padded ones count)."""
        self.states[layer_idx] = state
        self.num_tokens[layer_idx] = self.num_tokens.get(layer_idx, 0) + num_new_tokens

    def select(self, rows: Tensor) -> "LayerStates":
        """A copy that holds the given rows `[M]` of the batch, for beam search or for dropping finished rows."""
        chosen = LayerStates()
        chosen.num_tokens = dict(self.num_tokens)
        for layer_idx, (conv, recurrent) in self.states.items():
            chosen.states[layer_idx] = MixerState(None if conv is None else conv[rows], recurrent[rows])
        return chosen

    def snapshot(self) -> "LayerStates":
        """A copy to return to later. Layers never write into a state they were given, so no tensor is copied."""
        copy = LayerStates()
        copy.states, copy.num_tokens = dict(self.states), dict(self.num_tokens)
        return copy
