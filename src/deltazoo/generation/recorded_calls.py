"""Taking tokens back: recorded calls of a mixer, from which the state after fewer tokens is computed again.

A recurrence cannot be run backwards, since a decay has no inverse. But the state before the recorded calls is at hand,
and so are the operator's inputs for every token since (`Replay`). The tokens that stay run through the same operator
again, without the projections before it and the output after it.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from deltazoo.layers.state import MixerState, Replay

__all__ = ["CroppableLinearLayer", "RecordedCalls"]


class RecordedCalls:
    """Calls of one mixer, and its state before the first of them. Copies share the tensors, which nothing changes."""

    def __init__(self) -> None:
        self._before: MixerState | None = None
        self._calls: list[tuple[Replay, int]] = []

    def __deepcopy__(self, memo: object) -> "RecordedCalls":
        copy = RecordedCalls()
        copy._before, copy._calls = self._before, list(self._calls)
        return copy

    @property
    def num_tokens(self) -> int:
        """Tokens of all recorded calls."""
        return sum(num_tokens for _, num_tokens in self._calls)

    def add(self, before: MixerState | None, replay: Replay, num_tokens: int) -> None:
        """Record a call.

        Args:
            before: state before the call; None: the call has the first tokens.
            replay: the call.
            num_tokens: of it.
        """
        if not self._calls:
            self._before = before
        self._calls.append((replay, num_tokens))

    def check(self, removed: int) -> None:
        """RuntimeError unless `removed` tokens can be taken back."""
        if removed > self.num_tokens:
            raise RuntimeError(
                f"cannot take back {removed} tokens of a recurrent state: {self.num_tokens} were recorded since "
                "deltazoo.generation.record(cache) or the last rollback; call record before the forward passes to undo"
            )

    def removed_by(self, tokens_to_remove: int, num_tokens: int | Tensor | None) -> int:
        """How many tokens a call of `crop` takes back.

        Args:
            tokens_to_remove: its argument: minus that number or, as older versions of transformers have it, a positive
                length to keep.
            num_tokens: the layer's length; None if it is unknown.

        Raises:
            RuntimeError: fewer were recorded; a length to keep of a layer of unknown length.
        """
        if tokens_to_remove > 0:
            if num_tokens is None:
                raise RuntimeError(
                    "crop needs the number of tokens to remove, as a negative number: the length of this recurrent "
                    "state is unknown, since its first tokens were not recorded"
                )
            tokens_to_remove = min(0, tokens_to_remove - int(num_tokens))
        self.check(-tokens_to_remove)
        return -tokens_to_remove

    @torch.no_grad()
    def state_without(self, removed: int) -> MixerState | None:
        """The state without the last `removed` recorded tokens."""
        state, left = self._before, self.num_tokens - removed
        for replay, num_tokens in self._calls:
            count = min(left, num_tokens)
            if count:
                state = replay(state, count)
            left -= count
        return state


class CroppableLinearLayer(LinearAttentionLayer):
    """The cache layer that accelerated models keep, from which tokens can be taken back.

    transformers' own crops the convolution's window alone.
    """

    is_croppable = True
    recorded: RecordedCalls
    num_tokens: int | None
    """Tokens seen so far; None if the first ones were not recorded, as nothing has counted them."""

    @classmethod
    def of(cls, layer: Any) -> "CroppableLinearLayer":
        """The same layer, changed in place."""
        if not isinstance(layer, cls):
            layer.__class__ = cls
            layer.recorded = RecordedCalls()
            layer.num_tokens = 0
        return layer

    def record(self, replay: Replay, num_tokens: int) -> None:
        """Remember a call of the mixer until the next `crop`; to be called before the state changes."""
        before = None
        if not self.recorded.num_tokens and self.has_previous_state[0]:
            before = MixerState(self.window.clone(), self.recurrent_states[0].clone())  # type: ignore[union-attr]
        if self.num_tokens == 0 and self.has_previous_state[0]:
            self.num_tokens = None
        if self.num_tokens is not None:
            self.num_tokens += num_tokens
        self.recorded.add(before, replay, num_tokens)

    @property
    def window(self) -> Tensor:
        """`[B, C, taps]`: the convolution's last inputs."""
        return self.conv_states[0][..., -self.conv_kernel_size[0] :]  # type: ignore[index,operator]

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As in transformers without recording: the window alone."""
        recording, self.record_past = self.record_past, False
        try:
            return super().update_conv_state(conv_states, *args, **kwargs)
        finally:
            self.record_past = recording

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens, or, if it is positive, those after that many.

        Raises:
            RuntimeError: too little was recorded.
        """
        removed = self.recorded.removed_by(tokens_to_remove, self.num_tokens)
        recorded, self.recorded = self.recorded, RecordedCalls()
        if not removed:
            return
        if self.num_tokens is not None:
            self.num_tokens -= removed
        state = recorded.state_without(removed)
        if state is None:
            return self.reset()
        self.conv_states[0].copy_(state.conv)  # type: ignore[union-attr,arg-type]
        self.recurrent_states[0].copy_(state.recurrent)  # type: ignore[union-attr]

    def reset(self) -> None:
        """Forget all tokens."""
        self.recorded = RecordedCalls()
        self.num_tokens = 0
        super().reset()
