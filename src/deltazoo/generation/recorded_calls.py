"""Recorded calls of a mixer, from which the state after fewer tokens is computed again."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from deltazoo.layers.rotary import Rotary
from deltazoo.layers.state import MixerState

__all__ = ["RecordedCalls"]


class _Call(NamedTuple):
    mixer: nn.Module
    hidden_states: Tensor
    attention_mask: Tensor | None
    rotary: Rotary | None


class RecordedCalls:
    """Calls of one mixer, and its state before the first of them."""

    def __init__(self) -> None:
        self._before: MixerState | None = None
        self._calls: list[_Call] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of all recorded calls."""
        return sum(call.hidden_states.shape[1] for call in self._calls)

    def add(
        self,
        state: MixerState | None,
        mixer: nn.Module,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary: Rotary | None,
    ) -> None:
        """Record a call.

        Args:
            state: before the call; None: the call has the first tokens.
            mixer, hidden_states, attention_mask, rotary: the call.
        """
        if not self._calls:
            self._before = state
        self._calls.append(_Call(mixer, hidden_states.detach(), attention_mask, rotary))

    @torch.no_grad()
    def state_after(self, num_tokens: int) -> MixerState | None:
        """The state after the first `num_tokens` recorded tokens, through which the mixer runs again."""
        states = _OneState(self._before)
        for mixer, hidden_states, attention_mask, rotary in self._calls:
            count = min(num_tokens, hidden_states.shape[1])
            if count:
                mask = None if attention_mask is None else attention_mask[:, :count]
                turned = {} if rotary is None else {"rotary": (rotary[0][:, :count], rotary[1][:, :count])}
                mixer(hidden_states[:, :count], attention_mask=mask, past_key_values=states, **turned)
            num_tokens -= count
        return states.state


class _OneState:
    """The state of one layer, as the `past_key_values` that a mixer expects."""

    fixed = False

    def __init__(self, state: MixerState | None) -> None:
        self.state = state

    def get_state(self, layer_idx: int) -> MixerState | None:
        return self.state

    def set_state(self, layer_idx: int, state: MixerState, num_new_tokens: int) -> None:
        self.state = state
