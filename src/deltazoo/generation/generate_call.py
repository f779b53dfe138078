"""One call of `model.generate`, whose decoding step is captured.

    prompt -> [forward, into a DynamicCache] -> [moved to a StaticCache] -> step -> step -> ...   (one graph, replayed)

During a call the model passes every forward pass to a `GenerateCall`. The prompt goes through the ordinary one. Each
later token is a replay of the captured step, unless `deltazoo.generation.conditions` has a reason against it.
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
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltazoo.generation.cache import CACHE, cache_in
from deltazoo.generation.capture import free_bytes, graphs_run_on
from deltazoo.generation.conditions import why_not_this_call, why_not_this_model
from deltazoo.generation.states import move_cache
from deltazoo.generation.static_cache import bytes_when_fixed, fixed_cache
from deltazoo.generation.step import CapturedStep, Fingerprint, steps_of

__all__ = ["GenerateCall", "StaticDecoding", "generate_call", "running_call"]

_LENGTH_MULTIPLE = 256
"""Static caches hold a multiple of this many tokens, so that calls of similar length share a step."""
_CAPTURES = 2
"""Most captures per call: a prompt in pieces may end in a single token, with other arguments than a step."""
_KEPT_SHARE = 64
"""Divisor of the device's memory: a captured step is kept if its states, keys and values take no more."""
_running: ContextVar[tuple["GenerateCall", ...]] = ContextVar("running", default=())
"""This thread's calls of `generate`, of all models, outermost first."""


def running_call(model: Any) -> "GenerateCall | None":
    """This thread's innermost call of a model's `generate`, None outside."""
    return next((call for call in reversed(_running.get()) if call.model is model), None)


@contextmanager
def generate_call(model: Any, wanted: bool | None, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """A context in which a call of `generate` runs, which may capture its step; at its end the last logits are checked.

    Raises:
        ValueError: `wanted` is True, and nothing can be captured.
    """
    steps, outer = steps_of(model), running_call(model)
    reason = "capture_step=False" if wanted is False else None
    if reason is None and kwargs.get("custom_generate") is not None:
        reason = "custom_generate brings a loop of its own"
    if reason is None and kwargs.get("synced_gpus"):
        reason = "synced_gpus keeps several processes in step"
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
        model: the model that generates.
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
