"""`model.generate` of models with delta-rule layers, whose decoding step is captured.

    prompt -> [forward, into a DynamicCache] -> [moved to a StaticCache] -> step -> step -> ...   (one graph, replayed)

transformers' loop prepares the inputs of each step and chooses tokens from its logits. During a call the model passes
every forward pass to a `GenerateCall`. The prompt goes through the ordinary one. Each later token is a replay of the
captured step, unless `deltazoo.generation.conditions` has a reason against it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticCache, StaticLayer
from transformers.generation import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.masking_utils import create_masks_for_generate, create_recurrent_attention_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltazoo.generation.batch import current_padding, refuse_empty, refuse_padding_at_the_end, whole_numbers
from deltazoo.generation.cache import CACHE, cache_in, is_used, takes_cache
from deltazoo.generation.capture import free_bytes, graphs_run_on
from deltazoo.generation.conditions import why_not_this_call, why_not_this_model
from deltazoo.generation.states import move_cache
from deltazoo.generation.static_cache import bytes_when_fixed, fixed_cache
from deltazoo.generation.step import CapturedStep, Fingerprint, steps_of
from deltazoo.names import first_reason

_LENGTH_MULTIPLE = 256
"""Static caches hold a multiple of this many tokens, so that calls of similar length share a step."""
_CAPTURES = 2
"""Most captures per call: a prompt in pieces may end in a single token, with other arguments than a step."""
_KEPT_SHARE = 64
"""Divisor of the device's memory: a captured step is kept if its states, keys and values take no more."""
_running: ContextVar[tuple["GenerateCall", ...]] = ContextVar("running", default=())
"""This thread's calls of `generate`, of all models, outermost first."""


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

    @takes_cache()
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
                no rows or no tokens; padding on the right, whose tokens transformers would take for the prompt's last.
            FloatingPointError: at the end, if the last logits hold NaN, which they do once a state has become NaN;
                never with `remove_invalid_values=True`.
        """
        prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        mask = kwargs.get("attention_mask")
        if kwargs.get("inputs_embeds") is None:
            if isinstance(prompt, Tensor) and prompt.ndim == 2:
                refuse_empty((prompt.shape[0], prompt.shape[1]))
            _check_tokens_to_run(prompt, mask, cache_in(kwargs))
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.numel() and not mask.is_floating_point():
            refuse_padding_at_the_end(mask)
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


def running_call(model: Any) -> "GenerateCall | None":
    """This thread's innermost call of a model's `generate`, None outside."""
    for call in reversed(_running.get()):  # at every token, so no generator
        if call.model is model:
            return call
    return None


@contextmanager
def generate_call(model: Any, wanted: bool | None, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """A context in which a call of `generate` runs, which may capture its step; at its end the last logits are checked.

    Raises:
        ValueError: `wanted` is True, and nothing can be captured.
    """
    steps, outer = steps_of(model), running_call(model)
    reason = first_reason(
        (wanted is False, "capture_step=False"),
        (kwargs.get("custom_generate") is not None, "custom_generate brings a loop of its own"),
        (kwargs.get("synced_gpus"), "synced_gpus keeps several processes in step"),
    )
    if reason is None and wanted is None:
        reason = why_not_this_model(model)
    if reason is None and not steps.in_use.acquire(blocking=False):
        reason = "another call of generate is running"
    call = GenerateCall(model, may_capture=reason is None, required=bool(wanted))
    # A call may begin others of the same model (in logits processors), which do not count as the last call.
    if reason is not None and (wanted or outer is None):
        call.decline(reason)
    before = _running.set((*_running.get(), call))
    try:
        yield
        call.check_last_logits()
    finally:
        _running.reset(before)
        if reason is None:
            call.keep_step()
            steps.in_use.release()


class GenerateCall:
    """One call of `generate`, which computes this thread's forward passes of the model.

    Args:
        may_capture: whether nothing known so far keeps the step from being captured.
        required: whether a step that cannot be captured is an error.

    Attributes:
        checks_logits: whether the last logits are kept, and must not hold NaN.
        last_logits: `[B, 1, vocabulary]`.
    """

    def __init__(self, model: Any, *, may_capture: bool, required: bool) -> None:
        self.model = model
        self.checks_logits = True
        self.last_logits: Tensor | None = None
        self._steps = steps_of(model)
        self._may_capture = may_capture
        self._required = required
        self._prompt_cache: Cache | None = None
        self._decoding: StaticDecoding | None = None
        self._captures_left = _CAPTURES

    def decline(self, reason: str) -> None:
        """Record the reason why the call runs the ordinary loop; ValueError if a captured step is required."""
        if self._required:
            raise ValueError(f"capture_step=True cannot act: {reason}")
        self._steps.last = f"the ordinary loop: {reason}"

    def begin(
        self, config: GenerationConfig, cache: Any, is_the_callers: bool, mode: GenerationMode, max_length: int
    ) -> None:
        """Capture steps after the prompt, unless the prepared arguments give a reason against it.

        Args:
            config, is_the_callers, mode: see `why_not_this_call`.
            cache: cache that `generate` fills with the prompt; a static one of the user's is used itself.
            max_length: most tokens that it will hold.
        """
        if not self._may_capture:
            return
        self._may_capture = False  # the decision is made once
        reason, failed = why_not_this_call(config, cache, is_the_callers, mode, self._required), self._steps.failed
        if reason is None and failed is not None and failed[0] == Fingerprint(self.model):
            reason = failed[1]
        if reason is not None:
            return self.decline(reason)
        config.disable_compile = True
        self._steps.last = "no step was needed"
        self._prompt_cache = cache
        self._max_length = -(-max_length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE

    def forward(self, forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a forward pass: of the ordinary one, `forward`, or for one token of a captured step."""
        cache, decoding, ids = cache_in(kwargs), self._decoding, kwargs.get("input_ids")
        if cache is None or torch.is_grad_enabled():
            return forward(**kwargs)
        if cache is self._prompt_cache:
            return self._prompt(forward, kwargs)
        if decoding is None or cache is not decoding.cache or ids is None or ids.shape[1] != 1:
            return forward(**kwargs)
        logits = decoding.replay(kwargs)
        if logits is None and self._capture(decoding, forward, kwargs):
            logits = decoding.replay(kwargs)
        if logits is None:
            return forward(**kwargs)
        self._steps.last = "captured"
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})  # type: ignore[arg-type]

    def _prompt(self, forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of the ordinary forward pass, whose cache then moves to a static one for captured steps."""
        outputs = forward(**kwargs)
        filled, self._prompt_cache = self._prompt_cache, None
        assert filled is not None
        if isinstance(filled, StaticCache):
            self._decoding = StaticDecoding(filled, rows=None)
            return outputs
        try:
            self._decoding = decoding = self._static_decoding(filled, len(outputs.logits))
        except ValueError as error:
            self.decline(str(error))
            return outputs
        move_cache(filled, decoding.cache)
        setattr(outputs, CACHE, decoding.cache)
        return outputs

    def _static_decoding(self, filled: Cache, rows: int) -> "StaticDecoding":
        """A static cache, emptied, and its step: those of an earlier call if they fit, otherwise new ones.

        It raises ValueError if the model can have no static cache, or there is too little memory for it.
        """
        model, max_length = self.model, self._max_length
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

    def _capture(self, decoding: "StaticDecoding", forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a step with these arguments could be captured; a failure is remembered."""
        if not self._captures_left:
            return False
        self._captures_left -= 1
        try:
            decoding.capture(self.model, forward, kwargs)
        except RuntimeError as error:
            if self._required:
                raise
            self._captures_left = 0
            reason = f"capturing the step failed ({str(error).splitlines()[0]})"
            self._steps.failed = Fingerprint(self.model), reason
            self.decline(reason)
            return False
        return True

    def keep_step(self) -> None:
        """Keep the captured step for the next call, unless it takes much memory."""
        decoding, device = self._decoding, self.model.device
        if decoding is None or decoding.step is None or decoding.rows is None or not graphs_run_on(device):
            return
        if decoding.step.cache_tensors.nbytes <= _total_bytes(device) // _KEPT_SHARE:
            self._steps.kept = decoding

    def check_last_logits(self) -> None:
        """Raise FloatingPointError if the last logits hold NaN; a check in every step would take too much time."""
        if not self.checks_logits or self.last_logits is None:
            return
        rows = self.last_logits.isnan().flatten(1).any(1).tolist()
        if True in rows:
            raise FloatingPointError(
                f"the model computed NaN in the logits of row {rows.index(True)}, so the tokens mean nothing; "
                "deltazoo.generate stops at the first such token and says where NaN comes from"
            )


class StaticDecoding:
    """A static cache and a model's captured step over it, for one set of arguments of the forward pass.

    Args:
        cache: a cache made by `deltazoo.generation.static_cache.fixed_cache`.
        rows: number of rows of the batch; None: the cache is the user's, and no other call gets it.

    Attributes:
        step: the captured step; None before `capture`.
    """

    def __init__(self, cache: StaticCache, rows: int | None) -> None:
        self.cache = cache
        self.rows = rows
        self.step: CapturedStep | None = None
        self._kinds: Any = None
        self._inputs: dict[str, Tensor] = {}

    def serves(self, model: Any, rows: int, max_length: int) -> bool:
        """Whether a new call can use the cache and the step that an earlier call captured."""
        fits = all(x.max_cache_len >= max_length for x in self.cache.layers if isinstance(x, StaticLayer))
        return self.rows == rows and fits and self.step is not None and self.step.is_valid_for(model)

    def capture(self, model: Any, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Capture `forward` for one token and these arguments; the values of their tensors may change later.

        Raises:
            RuntimeError: the step waits for the device, or memory runs out; then there is no captured step.
        """
        replaced, self.step = self.step, None  # alive until the end of this call, since it owns the merged weights
        given = _by_name(arguments)
        self._inputs = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}
        fixed = {name: self._inputs.get(name, x) for name, x in arguments.items()}
        masks = arguments.get("attention_mask")
        if isinstance(masks, Mapping):
            fixed["attention_mask"] = {name: self._inputs.get(_mask(name), x) for name, x in masks.items()}
        self.step = CapturedStep(model, lambda: forward(**fixed).logits, self.cache)
        self._kinds = _kinds(given)
        del replaced

    def replay(self, arguments: Mapping[str, Any]) -> Tensor | None:
        """The logits after one more token, valid until the next replay; None if no captured step fits the arguments."""
        given = _by_name(arguments)
        if self.step is None or self._kinds != _kinds(given):
            return None
        self.step.cache_tensors.put_back()
        for name, x in given.items():
            if isinstance(x, Tensor):
                self._inputs[name].copy_(x)
        self.step.replay()
        return self.step.output


def _mask(name: str) -> str:
    return f"attention_mask.{name}"


def _by_name(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a forward pass, with the masks of a dict as single arguments."""
    masks = arguments.get("attention_mask")
    return {**arguments, **{_mask(name): x for name, x in masks.items()}} if isinstance(masks, Mapping) else arguments


def _kinds(given: Mapping[str, Any]) -> dict[str, Any]:
    """Properties that must not change from step to step: kinds of tensors, and all other arguments but the cache."""
    return {
        name: (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x
        for name, x in given.items()
        if not isinstance(x, Mapping | Cache)
    }


def _total_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else sys.maxsize
