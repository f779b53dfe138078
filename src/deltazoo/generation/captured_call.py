"""One call of `model.generate` whose steps are captured.

    prompt -> [forward, into a DynamicCache] -> [moved to a StaticCache] -> step -> step -> ...   (one graph, replayed)

During the call a `CapturedCall` is the model's `forward`. The prompt goes through the ordinary forward pass. Each later
token is a replay of the captured step, which starts from the inputs that transformers' loop prepared and ends with
logits, from which the loop chooses the next token.
"""

from collections.abc import Mapping
from functools import update_wrapper
from typing import Any

import torch
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltazoo.generation.cache_argument import CACHE, cache_in
from deltazoo.generation.kept_steps import KeptSteps
from deltazoo.generation.static_cache import move_cache
from deltazoo.generation.static_decoding import StaticDecoding

__all__ = ["CapturedCall"]

_LENGTH_MULTIPLE = 256
"""Static caches hold a multiple of this many tokens, so that calls of similar length share a step."""
_CAPTURES = 2
"""Captures per call at most: a prompt in pieces may end in a piece of one token, with other arguments than a step."""


class CapturedCall:
    """Replaces a model's `forward` from `begin` to `end`.

    Args:
        model: that generates.
        steps: what the model keeps between calls.
        required: a step that cannot be captured is an error.

    Attributes:
        began: whether `begin` has been called.
    """

    def __init__(self, model: Any, steps: KeptSteps, required: bool) -> None:
        update_wrapper(self, model.forward)
        self.model = model
        self.steps = steps
        self.forward = model.forward
        self.required = required
        self.began = False
        self._source: Cache | None = None
        self._decoding: StaticDecoding | None = None
        self._captures = 0

    def begin(self, cache: Any, max_length: int) -> None:
        """Replace `forward`.

        Args:
            cache: that `generate` fills with the prompt; a static one, the user's own, is used as it is.
            max_length: tokens that will be in it at most.
        """
        self.began = True
        self._replaced = vars(self.model).get("forward")  # a hook of accelerate, or compiled code
        self._is_users_cache = type(cache) is StaticCache
        if self._is_users_cache:
            self._decoding = StaticDecoding(cache, 0)
        else:
            self._source = cache
            self._max_length = -(-max_length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        self.model.forward = self
        self.steps.last = "no step was needed"

    def end(self) -> None:
        """Restore `forward`, and keep the captured step for the next call."""
        del self.model.forward
        if self._replaced is not None:
            self.model.forward = self._replaced
        if self._decoding is not None and not self._is_users_cache:
            self.steps.keep(self._decoding, self.model.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass: of the prompt, of one token by a captured step, or the ordinary one."""
        cache = cache_in(kwargs)
        if args or cache is None or torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if cache is self._source:
            return self._prompt(kwargs)
        ids = kwargs.get("input_ids")
        one_token = ids is not None and ids.shape[1] == 1
        if one_token and self._decoding is not None and cache is self._decoding.cache and _is_filled(cache):
            return self._step(self._decoding, kwargs)
        return self.forward(**kwargs)

    def _prompt(self, kwargs: Mapping[str, Any]) -> Any:
        """The ordinary forward pass; then its cache is moved to a static one, over which steps are captured."""
        outputs = self.forward(**kwargs)
        source, self._source = self._source, None
        try:
            decoding = self.steps.take(self.model, source, len(outputs.logits), self._max_length)  # type: ignore[arg-type]
        except ValueError as error:
            self.steps.decline(str(error), self.required)
            return outputs
        move_cache(source, decoding.cache)  # type: ignore[arg-type]
        setattr(outputs, CACHE, decoding.cache)
        self._decoding = decoding
        return outputs

    def _step(self, decoding: StaticDecoding, kwargs: Mapping[str, Any]) -> Any:
        if not decoding.has_step_for(kwargs):
            if self._captures == _CAPTURES:
                return self.forward(**kwargs)
            self._captures += 1
            try:
                decoding.capture(self.model, self.forward, kwargs)
            except RuntimeError as error:
                if self.required:
                    raise
                self._captures = _CAPTURES
                self.steps.record_failure(self.model, error)
                return self.forward(**kwargs)
        self.steps.last = "captured"
        return CausalLMOutputWithPast(logits=decoding.replay(kwargs), **{CACHE: decoding.cache})  # type: ignore[arg-type]


def _is_filled(cache: Any) -> bool:
    return all(
        layer.has_previous_state[0] if isinstance(layer, LinearAttentionCacheLayerMixin) else layer.is_initialized
        for layer in cache.layers
    )
