"""What a causal language model with delta-rule layers adds to transformers' `generate`: a captured decoding step.

transformers' loop stays in charge: it prepares each step's inputs and chooses tokens from its logits. Only what the
model's `forward` does with one token is captured in a CUDA graph (`deltazoo.generation.captured_call`), and only where
the result does not depend on that (`deltazoo.generation.capture_conditions`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.generation import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.masking_utils import create_masks_for_generate, create_recurrent_attention_mask

from deltazoo.generation.batch import current_padding, refuse_empty, whole_numbers
from deltazoo.generation.cache import is_used
from deltazoo.generation.cache_argument import cache_in
from deltazoo.generation.capture_conditions import why_not_these_arguments, why_not_this_call, why_not_this_model
from deltazoo.generation.captured_call import CapturedCall
from deltazoo.generation.kept_steps import KeptSteps

__all__ = ["CapturedGeneration", "without_single_tokens"]


class CapturedGeneration:
    """Mixin for a class with `prepare_cache`; name it before any `nn.Module` and before `GenerationMixin`."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: continuous batching shares pages of keys and values among requests, and a state has no pages."""
        raise NotImplementedError(
            f"{type(self).__name__} has delta-rule layers, whose state transformers' continuous batching "
            '(generate_batch, cache_implementation="paged") cannot hold: pass generate a padded batch'
        )

    def generate(self, *args: Any, capture_step: bool | None = None, **kwargs: Any) -> Any:
        """As in transformers, and:

        Args:
            args, kwargs: as in transformers.
            capture_step: run the steps over fixed addresses, on a GPU from one CUDA graph; tokens are the same. None:
                on a GPU, where nothing prevents it (`deltazoo.report(model)` says what does). True: always, or
                raise; hooks then run only while the step is captured, and a returned cache is a static one. False:
                never.

        Raises:
            ValueError: with `capture_step=True`, where a step cannot be captured; a cache that holds the whole prompt;
                no rows or no tokens.
            FloatingPointError: at the end, if the last logits hold NaN, as they do once a state has become NaN; never
                with `remove_invalid_values=True`.
        """
        prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if kwargs.get("inputs_embeds") is None:
            if isinstance(prompt, Tensor) and prompt.ndim == 2:
                refuse_empty((prompt.shape[0], prompt.shape[1]))
            _check_tokens_to_run(prompt, kwargs.get("attention_mask"), cache_in(kwargs))
        with _call_offered(self, capture_step, kwargs), _last_logits_checked(self):
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _get_static_cache_init_shape(self) -> None:
        """Have layers of static caches take their shapes from the first keys, as linear layers have none."""

    def create_masks_for_generate(self, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """As in transformers, but linear layers are told of the padding in every piece of a prompt.

        transformers 5.14 tells them of none once the cache holds a state.

        Raises:
            ValueError: the mask says something else than which tokens are real, which linear layers cannot follow.
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
            ValueError: the model is the assistant of another, which would take tokens back from the cache.
        """
        if generation_config.is_assistant:
            raise ValueError(
                f"{type(self).__name__} has delta-rule layers, whose state cannot take rejected tokens back: it cannot "
                "be the assistant of another model"
            )
        is_the_callers = cache_in(model_kwargs) is not None
        generation_config.prefill_chunk_size = without_single_tokens(generation_config.prefill_chunk_size)
        if generation_config.remove_invalid_values:  # NaN is expected, and handled
            _steps_of(self).last_logits = None
        super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        cache = cache_in(model_kwargs)
        if cache is not None:
            self.prepare_cache(cache)  # type: ignore[attr-defined]
        _begin_offered_call(self, generation_config, cache, is_the_callers, generation_mode, max_cache_length)

    def _update_model_kwargs_for_generation(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, whose loops call this after each forward pass; keeps the last logits for a check."""
        kept, logits = _steps_of(self).last_logits, outputs.get("logits")
        if kept is not None and logits is not None:  # a view would keep those of a whole prompt in memory
            kept[:] = [logits if logits.shape[1] == 1 else logits[:, -1:].clone()]
        return super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)  # type: ignore[misc]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the model, and free the memory of captured steps."""
        _steps_of(self).forget()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Any:
        """Set the mode; training frees the memory of captured steps."""
        if mode:
            _steps_of(self).forget()
        return super().train(mode)  # type: ignore[misc]

    def describe_decoding(self) -> str:
        """How `generate` runs its steps, and how the last call ran them, for `deltazoo.report`."""
        reason = why_not_this_model(self)
        now = "captures its step in a CUDA graph" if reason is None else f"runs the ordinary loop: {reason}"
        last = _steps_of(self).last
        return f"generate {now}" if last is None else f"generate {now} (the last call: {last})"


def _check_tokens_to_run(prompt: Any, mask: Any, cache: Any) -> None:
    """ValueError if a cache holds the whole prompt: transformers would run it once more after its own tokens.

    A prompt may also be the new tokens alone. Its mask is then one of all tokens, and so is longer.
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
    """Tokens of a prompt per forward pass, at least 2: a single token is taken for a decoding step, never for padding.

    A prompt of an odd length may still end in a single token, which is real, as padding is on the left.
    """
    return 2 if prefill_chunk == 1 else prefill_chunk


def _steps_of(model: Any) -> KeptSteps:
    return vars(model).setdefault("_captured_steps", KeptSteps())


@contextmanager
def _last_logits_checked(model: Any) -> Iterator[None]:
    """FloatingPointError at the end of this context, a call of `generate`, if its last logits hold NaN.

    A check of every step's would cost as much as other parts of a step.
    """
    steps = _steps_of(model)
    before, steps.last_logits = steps.last_logits, []
    try:
        yield
        for logits in steps.last_logits or ():
            rows = logits.isnan().flatten(1).any(1).tolist()
            if True in rows:
                raise FloatingPointError(
                    f"the model computed NaN in the logits of row {rows.index(True)}, so the tokens mean nothing; "
                    "deltazoo.generate stops at the first such token and says where NaN comes from"
                )
    finally:
        steps.last_logits = before


@contextmanager
def _call_offered(model: Any, wanted: bool | None, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Within this context one call of `generate` may capture its step; afterwards `model.forward` is as before.

    Raises:
        ValueError: `wanted` is True, and nothing can be captured.
    """
    steps = _steps_of(model)
    reason = "capture_step=False" if wanted is False else why_not_these_arguments(kwargs)
    if reason is None and wanted is None:
        reason = why_not_this_model(model)
    if reason is None and not steps.in_use.acquire(blocking=False):
        reason = "another call of generate is running"
    call = CapturedCall(model, steps, required=bool(wanted)) if reason is None else None
    # A call may begin others of the same model (processors of logits), which are not "the last call".
    if reason is not None and (wanted or not steps.running):
        steps.decline(reason, bool(wanted))
    steps.running.append(call)
    try:
        yield
    finally:
        steps.running.pop()
        if call is not None:
            if call.began:
                call.end()
            steps.in_use.release()


def _begin_offered_call(
    model: Any, config: GenerationConfig, cache: Any, is_the_callers: bool, mode: GenerationMode, max_length: int
) -> None:
    """Have the innermost call capture its step, now that all arguments are known, or record why it does not."""
    steps = _steps_of(model)
    call: CapturedCall | None = steps.running[-1] if steps.running else None
    if call is None or call.began:
        return
    reason = why_not_this_call(config, cache, is_the_callers, mode, call.required) or steps.earlier_failure(model)
    if reason is not None:
        return steps.decline(reason, call.required)
    config.disable_compile = True
    call.begin(cache, max_length)
