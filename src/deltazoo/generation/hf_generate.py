"""`model.generate` of models with delta-rule layers.

transformers' loop prepares the inputs of each step and chooses tokens from its logits. The forward passes of a call go
through a `GenerateCall`, which may compute them by a captured step.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.masking_utils import create_masks_for_generate, create_recurrent_attention_mask

from deltazoo.generation.batch import current_padding, refuse_empty, whole_numbers
from deltazoo.generation.cache import cache_in, is_used
from deltazoo.generation.conditions import why_not_this_model
from deltazoo.generation.generate_call import generate_call, running_call
from deltazoo.generation.step import steps_of

__all__ = ["CapturedGeneration", "without_single_tokens"]


class CapturedGeneration:
    """A mixin for a class with `prepare_cache`, to be named before any `nn.Module` and before `GenerationMixin`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the forward pass; within `generate` a replay of the captured step may compute it."""
        call = None if args or torch.compiler.is_compiling() else running_call(self)
        if call is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return call.forward(super().__call__, kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching: requests share pages of keys and values there, and a state has no pages."""
        raise NotImplementedError(
            f"{type(self).__name__} has delta-rule layers, whose state transformers' continuous batching "
            '(generate_batch, cache_implementation="paged") cannot hold: pass generate a padded batch'
        )

    def generate(self, *args: Any, capture_step: bool | None = None, **kwargs: Any) -> Any:
        """The output of transformers' `generate`, with captured steps where possible.

        Args:
            args, kwargs: the arguments of transformers.
            capture_step: whether steps run over fixed addresses, on a GPU from one CUDA graph; tokens are the same.
                None: on a GPU, unless there is a reason against it, which `deltazoo.report(model)` shows. True: always,
                or ValueError; hooks then run only while the step is captured, and a returned cache is a static one.
                False: never.

        Raises:
            ValueError: with `capture_step=True`, a step that cannot be captured; a cache that holds the whole prompt;
                no rows or no tokens.
            FloatingPointError: at the end, if the last logits hold NaN, which they do once a state has become NaN;
                never with `remove_invalid_values=True`.
        """
        prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if kwargs.get("inputs_embeds") is None:
            if isinstance(prompt, Tensor) and prompt.ndim == 2:
                refuse_empty((prompt.shape[0], prompt.shape[1]))
            _check_tokens_to_run(prompt, kwargs.get("attention_mask"), cache_in(kwargs))
        with generate_call(self, capture_step, kwargs):
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _get_static_cache_init_shape(self) -> None:
        """None, so that layers of static caches take their shapes from the first keys; linear layers have no keys."""

    def create_masks_for_generate(self, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """The masks of transformers, with the padding in every piece of a prompt for linear layers.

        transformers 5.14 gives linear layers no mask once the cache holds a state.

        Raises:
            ValueError: a mask that is not about padding, which linear layers cannot follow.
        """
        several_tokens = inputs_embeds.shape[1] > 1  # a single one is never padding, see `without_single_tokens`
        if several_tokens:
            current_padding(whole_numbers(attention_mask), (inputs_embeds.shape[0], inputs_embeds.shape[1]), None)
        create = getattr(super(), "create_masks_for_generate", create_masks_for_generate)
        masks = create(inputs_embeds=inputs_embeds, attention_mask=attention_mask, **kwargs)
        if several_tokens and isinstance(masks, dict) and masks.get("linear_attention", ...) is None:
            masks["linear_attention"] = create_recurrent_attention_mask(kwargs["config"], inputs_embeds, attention_mask)
        return masks

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Prepare the cache; transformers calls this once all arguments of `generate` are known.

        Raises:
            ValueError: the model is the assistant of another model, which would take tokens back from the cache.
        """
        if generation_config.is_assistant:
            raise ValueError(
                f"{type(self).__name__} has delta-rule layers, whose state cannot take rejected tokens back: it cannot "
                "be the assistant of another model"
            )
        is_the_callers = cache_in(model_kwargs) is not None
        generation_config.prefill_chunk_size = without_single_tokens(generation_config.prefill_chunk_size)
        call = running_call(self)
        if call is not None and generation_config.remove_invalid_values:  # transformers replaces NaN
            call.checks_logits = False
        super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        cache = cache_in(model_kwargs)
        if cache is not None:
            self.prepare_cache(cache)  # type: ignore[attr-defined]
        if call is not None:
            call.begin(generation_config, cache, is_the_callers, generation_mode, max_cache_length)

    def _update_model_kwargs_for_generation(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The arguments of the next step. transformers calls this after each forward pass; it keeps the last logits."""
        call, logits = running_call(self), outputs.get("logits")
        if call is not None and call.checks_logits and logits is not None:
            # A view would keep the logits of a whole prompt in memory.
            call.last_logits = logits if logits.shape[1] == 1 else logits[:, -1:].clone()
        return super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)  # type: ignore[misc]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the model, and free the memory of captured steps."""
        steps_of(self).kept = None
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Any:
        """Set the mode; training frees the memory of captured steps."""
        if mode:
            steps_of(self).kept = None
        return super().train(mode)  # type: ignore[misc]

    def describe_decoding(self) -> str:
        """A line for `deltazoo.report`: how `generate` runs its steps, and how the last call ran them."""
        reason = why_not_this_model(self)
        now = "captures its step in a CUDA graph" if reason is None else f"runs the ordinary loop: {reason}"
        last = steps_of(self).last
        return f"generate {now}" if last is None else f"generate {now} (the last call: {last})"


def _check_tokens_to_run(prompt: Any, mask: Any, cache: Any) -> None:
    """Raise ValueError if a cache holds the whole prompt, since transformers would run the prompt once more after it.

    A prompt may also consist of the new tokens alone. Its mask is then a mask of all tokens, and so is longer.
    """
    used = any(is_used(layer) for layer in getattr(cache, "layers", ()))
    if not (used and isinstance(prompt, Tensor) and prompt.ndim == 2):
        return
    if isinstance(mask, Tensor) and mask.shape[-1] != prompt.shape[1]:
        return
    held, given = int(cache.get_seq_length()), prompt.shape[1]
    if held >= given:
        raise ValueError(
            f"the cache holds {held} tokens, and the prompt has {given}, those in the cache included: at least "
            "one must follow them. Take the cache from before the prompt's last token, leave the cache out, or "
            "give new tokens alone and an attention_mask of all"
        )


def without_single_tokens(prefill_chunk: int | None) -> int | None:
    """Tokens of a prompt per forward pass, at least 2, since a single token counts as a decoding step without padding.

    A prompt of an odd length may still end in a single token, which is real, since padding is on the left.
    """
    return 2 if prefill_chunk == 1 else prefill_chunk
