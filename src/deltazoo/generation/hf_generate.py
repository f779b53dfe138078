"""`model.generate` with a captured decoding step.

    prompt -> [forward, into a DynamicCache] -> [moved to a StaticCache] -> step -> step -> ...   (one graph, replayed)

transformers' loop stays in charge: it prepares each step's inputs and chooses tokens from its logits. During a call of
`generate` the model hands every forward pass to a `GenerateCall`. The prompt goes through the ordinary one. Each later
token is a replay of the captured step, where the result does not depend on that (`deltazoo.generation.conditions`).
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, StaticCache
from transformers.generation import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.masking_utils import create_masks_for_generate, create_recurrent_attention_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltazoo.generation.batch import current_padding, refuse_empty, whole_numbers
from deltazoo.generation.cache import is_used
from deltazoo.generation.cache_argument import CACHE, cache_in
from deltazoo.generation.capture import free_bytes, graphs_run_on
from deltazoo.generation.conditions import why_not_these_arguments, why_not_this_call, why_not_this_model
from deltazoo.generation.static_cache import bytes_when_fixed, fixed_cache, move_cache
from deltazoo.generation.step import Fingerprint, StaticDecoding

__all__ = ["CapturedGeneration", "without_single_tokens"]

_LENGTH_MULTIPLE = 256
"""Static caches hold a multiple of this many tokens, so that calls of similar length share a step."""
_CAPTURES = 2
"""Captures per call at most: a prompt in pieces may end in a piece of one token, with other arguments than a step."""
_KEPT_SHARE = 64
"""A captured step is kept if its states, keys and values take no more than the device's memory over this."""


class CapturedGeneration:
    """Mixin for a class with `prepare_cache`; name it before any `nn.Module` and before `GenerationMixin`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass; within `generate` one token's may be a replay of the captured step."""
        call = None if args or torch.compiler.is_compiling() else _running_call(self)
        if call is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return call.forward(super().__call__, kwargs)  # type: ignore[misc]

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
        with _generate_call(self, capture_step, kwargs):
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
        call = _running_call(self)
        if call is not None and generation_config.remove_invalid_values:  # NaN is expected, and handled
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
        """As in transformers, whose loops call this after each forward pass; keeps the last logits for a check."""
        call, logits = _running_call(self), outputs.get("logits")
        if call is not None and call.checks_logits and logits is not None:
            # A view would keep those of a whole prompt in memory.
            call.last_logits = logits if logits.shape[1] == 1 else logits[:, -1:].clone()
        return super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)  # type: ignore[misc]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the model, and free the memory of captured steps."""
        _steps_of(self).kept = None
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Any:
        """Set the mode; training frees the memory of captured steps."""
        if mode:
            _steps_of(self).kept = None
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


class KeptSteps:
    """The captured step of a model's last call, and how that call went; copies of the model start with an empty one.

    Attributes:
        last: how the last call ran its steps, in words.
        kept: for the next call, None if there is none.
        failed: why a step could not be captured, and the model's fingerprint then.
        in_use: held while a call captures and replays; one at a time.
    """

    def __init__(self) -> None:
        self.last: str | None = None
        self.kept: StaticDecoding | None = None
        self.failed: tuple[Fingerprint, str] | None = None
        self.in_use = threading.Lock()
        self._of_thread = threading.local()

    def __deepcopy__(self, memo: object) -> "KeptSteps":
        return KeptSteps()

    def __reduce__(self) -> Any:
        return KeptSteps, ()

    @property
    def running(self) -> "list[GenerateCall]":
        """This thread's calls of `generate`, outermost first."""
        return self._of_thread.__dict__.setdefault("running", [])


def _steps_of(model: Any) -> KeptSteps:
    steps = vars(model).get("_captured_steps")
    return vars(model).setdefault("_captured_steps", KeptSteps()) if steps is None else steps


def _running_call(model: Any) -> "GenerateCall | None":
    """This thread's innermost call of a model's `generate`, None outside."""
    steps = vars(model).get("_captured_steps")
    running = [] if steps is None else steps.running
    return running[-1] if running else None


@contextmanager
def _generate_call(model: Any, wanted: bool | None, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Within this context a call of `generate` runs, which may capture its step; at the end its logits are checked.

    Raises:
        ValueError: `wanted` is True, and nothing can be captured.
    """
    steps = _steps_of(model)
    call = GenerateCall(model, steps, required=bool(wanted))
    reason = "capture_step=False" if wanted is False else why_not_these_arguments(kwargs)
    if reason is None and wanted is None:
        reason = why_not_this_model(model)
    if reason is None and not steps.in_use.acquire(blocking=False):
        reason = "another call of generate is running"
    # A call may begin others of the same model (processors of logits), which are not "the last call".
    if reason is not None and (wanted or not steps.running):
        call.decline(reason)
    call.may_capture = reason is None
    steps.running.append(call)
    try:
        yield
        call.check_last_logits()
    finally:
        steps.running.pop()
        if reason is None:
            call.end()
            steps.in_use.release()


class GenerateCall:
    """One call of `generate`, through which this thread's forward passes of the model go.

    Args:
        model: that generates.
        steps: what it keeps between calls.
        required: a step that cannot be captured is an error.

    Attributes:
        may_capture: nothing that is known so far keeps the step from being captured.
        checks_logits: the last logits are kept, and must not hold NaN.
        last_logits: `[B, 1, vocabulary]`.
    """

    def __init__(self, model: Any, steps: KeptSteps, required: bool) -> None:
        self.may_capture = False
        self.checks_logits = True
        self.last_logits: Tensor | None = None
        self._model = model
        self._steps = steps
        self._required = required
        self._source: Cache | None = None
        self._decoding: StaticDecoding | None = None
        self._is_filled = False
        self._captures = 0

    def decline(self, reason: str) -> None:
        """Record why the call runs the ordinary loop; ValueError if it must not."""
        if self._required:
            raise ValueError(f"capture_step=True cannot act: {reason}")
        self._steps.last = f"the ordinary loop: {reason}"

    def begin(
        self, config: GenerationConfig, cache: Any, is_the_callers: bool, mode: GenerationMode, max_length: int
    ) -> None:
        """Capture steps from here on, unless something that is known now is against it.

        Args:
            config, is_the_callers, mode: see `why_not_this_call`.
            cache: that `generate` fills with the prompt; a static one, the user's own, is used as it is.
            max_length: tokens that will be in it at most.
        """
        if not self.may_capture:
            return
        self.may_capture = False  # decided once
        reason, failed = why_not_this_call(config, cache, is_the_callers, mode, self._required), self._steps.failed
        if reason is None and failed is not None and failed[0] == Fingerprint(self._model):
            reason = failed[1]
        if reason is not None:
            return self.decline(reason)
        config.disable_compile = True
        self._steps.last = "no step was needed"
        if type(cache) is StaticCache:
            self._decoding = StaticDecoding(cache, rows=None)
        else:
            self._source = cache
            self._max_length = -(-max_length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE

    def end(self) -> None:
        """Keep the captured step for the next call, unless it takes much memory."""
        decoding, device = self._decoding, self._model.device
        if decoding is None or decoding.step is None or decoding.rows is None or not graphs_run_on(device):
            return
        if decoding.step.cache_tensors.nbytes <= _total_bytes(device) // _KEPT_SHARE:
            self._steps.kept = decoding

    def check_last_logits(self) -> None:
        """FloatingPointError if the last logits hold NaN: a check of every step's would cost as much as other parts."""
        if not self.checks_logits or self.last_logits is None:
            return
        rows = self.last_logits.isnan().flatten(1).any(1).tolist()
        if True in rows:
            raise FloatingPointError(
                f"the model computed NaN in the logits of row {rows.index(True)}, so the tokens mean nothing; "
                "deltazoo.generate stops at the first such token and says where NaN comes from"
            )

    def forward(self, forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
        """A forward pass: the ordinary one, given as `forward`, or of one token by a captured step."""
        cache = cache_in(kwargs)
        if cache is None or torch.is_grad_enabled():
            return forward(**kwargs)
        if cache is self._source:
            return self._prompt(forward, kwargs)
        decoding, ids = self._decoding, kwargs.get("input_ids")
        one_token = ids is not None and ids.shape[1] == 1
        if decoding is None or cache is not decoding.cache or not one_token:
            return forward(**kwargs)
        self._is_filled = self._is_filled or _is_filled(cache)
        if not self._is_filled:  # the prompt is one token
            return forward(**kwargs)
        logits = decoding.replay(kwargs)
        if logits is None and self._capture(decoding, forward, kwargs):
            logits = decoding.replay(kwargs)
        if logits is None:
            return forward(**kwargs)
        self._steps.last = "captured"
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})  # type: ignore[arg-type]

    def _prompt(self, forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
        """The ordinary forward pass; then its cache is moved to a static one, over which steps are captured."""
        outputs = forward(**kwargs)
        source, self._source = self._source, None
        assert source is not None
        try:
            self._decoding = decoding = self._static_decoding(source, len(outputs.logits))
        except ValueError as error:
            self.decline(str(error))
            return outputs
        move_cache(source, decoding.cache)
        setattr(outputs, CACHE, decoding.cache)
        return outputs

    def _static_decoding(self, filled: Cache, rows: int) -> StaticDecoding:
        """With an empty cache: that of an earlier call, with its captured step, if they fit; otherwise a new one.

        Args:
            filled: the cache whose contents will be moved to the static one.
            rows: of the batch.

        Raises:
            ValueError: the model can have no such cache, or there is too little memory for it.
        """
        model, max_length = self._model, self._max_length
        kept, self._steps.kept = self._steps.kept, None
        if kept is not None and kept.serves(model, rows, max_length):
            kept.cache.reset()
            return kept
        del kept
        needed, free = bytes_when_fixed(filled, max_length), free_bytes(model.device)
        if 2 * needed > free:
            raise ValueError(
                f"the keys and values of {max_length} tokens take {needed / 2**30:.1f} GiB at once, and "
                f"{free / 2**30:.1f} GiB are free"
            )
        return StaticDecoding(fixed_cache(model, max_length), rows)

    def _capture(self, decoding: StaticDecoding, forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a step with these arguments could be captured; that it could not is remembered."""
        if self._captures == _CAPTURES:
            return False
        self._captures += 1
        try:
            decoding.capture(self._model, forward, kwargs)
        except RuntimeError as error:
            if self._required:
                raise
            self._captures = _CAPTURES
            reason = f"capturing the step failed ({str(error).splitlines()[0]})"
            self._steps.failed = Fingerprint(self._model), reason
            self.decline(reason)
            return False
        return True


def _is_filled(cache: Any) -> bool:
    return all(
        layer.has_previous_state[0] if isinstance(layer, LinearAttentionCacheLayerMixin) else layer.is_initialized
        for layer in cache.layers
    )


def _total_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else sys.maxsize
