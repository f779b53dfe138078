"""`model.generate` with its decoding step in a CUDA graph, wherever nothing but the time it takes depends on that.

    prompt -> [as ever, into a DynamicCache] -> [moved to a StaticCache] -> step -> step -> ...   (one graph, replayed)

transformers' loop stays in charge: it prepares each step's inputs and chooses tokens from its logits. Only what the
model's `forward` does with one token is captured, once, and kept for the next call if it is small.
"""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
)
from transformers.generation import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltazoo.generation.cache import DeltaRuleCacheLayer
from deltazoo.generation.capture_conditions import Fingerprint, why_not_this_model
from deltazoo.generation.merged_projections import MergedProjections
from deltazoo.generation.step_capture import (
    FixedTensors,
    bytes_when_fixed,
    capture,
    check_fixed,
    fixed_cache,
    graphs_run_on,
    move_cache,
)

__all__ = ["CapturedGeneration", "CapturedSteps"]

_KEPT_SHARE = 64
"""A captured step is kept after `generate` if its states, keys and values take no more than the device's memory over
this."""
_ROOM = 256
"""Keys and values get room for a multiple of this many tokens, so that calls of similar length share a step."""
_CAPTURES = 2
"""Per call of `generate`: a prompt in pieces may end in a piece of one token, with other arguments than a step."""
_ONE_TOKEN_AT_A_TIME = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)


class CapturedGeneration:
    """What a causal language model with delta-rule layers adds to transformers' `generate`.

    For a class with `prepare_cache`; its bases name this before any `nn.Module` and before `GenerationMixin`.
    """

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: `generate_batch` and its kin share pages of keys and values among requests; a state has no pages."""
        raise NotImplementedError(
            f"{type(self).__name__} has delta-rule layers, whose state transformers' continuous batching "
            '(generate_batch, cache_implementation="paged") cannot hold: pass generate a padded batch'
        )

    def generate(self, *args: Any, capture_step: bool | None = None, **kwargs: Any) -> Any:
        """As in transformers, and:

        Args:
            args, kwargs: as in transformers.
            capture_step: run the steps over fixed addresses, on a GPU from one CUDA graph; tokens are the same. None:
                on a GPU, where nothing stands against it (`deltazoo.report(model)` says what does); True: or raise, and
                then hooks run only while the step is captured, and a returned cache is a static one; False: never.

        Raises:
            ValueError: with `capture_step=True`, where a step cannot be captured.
        """
        with _steps_of(self).offered(self, capture_step, kwargs):
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            self.prepare_cache(cache)  # type: ignore[attr-defined]
            if generation_config.is_assistant:
                cache.activate_past_recording()
        _steps_of(self).accept(self, generation_config, cache, generation_mode, max_cache_length)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the model, and give back the memory of captured steps."""
        _steps_of(self).forget()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Any:
        """Set the mode; training gets back the memory of captured steps."""
        if mode:
            _steps_of(self).forget()
        return super().train(mode)  # type: ignore[misc]

    def describe_decoding(self) -> str:
        """How `generate` runs its steps, and ran them last, for `deltazoo.report`."""
        reason = why_not_this_model(self)
        now = "captures its step in a CUDA graph" if reason is None else f"runs the ordinary loop: {reason}"
        last = _steps_of(self).last
        return f"generate {now}" if last is None else f"generate {now} (the last call: {last})"


def _steps_of(model: Any) -> "CapturedSteps":
    return vars(model).setdefault("_captured_steps", CapturedSteps())


class CapturedSteps:
    """What a model keeps of captured steps between calls of `generate`; copies of the model start without."""

    def __init__(self) -> None:
        self.last: str | None = None
        """How the last call ran its steps."""
        self._kept: _FixedState | None = None
        self._failed: tuple[Fingerprint, str] | None = None
        self._in_use = threading.Lock()
        self._calls = threading.local()

    def __deepcopy__(self, memo: object) -> "CapturedSteps":
        return CapturedSteps()

    def __reduce__(self) -> Any:
        return CapturedSteps, ()

    def forget(self) -> None:
        """Free what is kept."""
        self._kept = None

    @contextmanager
    def offered(self, model: Any, wanted: bool | None, kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Within this context one call of `generate` may capture its step; in the end `model.forward` is as before.

        Raises:
            ValueError: `wanted` is True, and nothing can be captured.
        """
        reason = "capture_step=False" if wanted is False else _why_not_these_arguments(kwargs)
        if reason is None and wanted is None:
            reason = why_not_this_model(model)
        if reason is None and not self._in_use.acquire(blocking=False):
            reason = "another call of generate is running"
        call = _Call(model, required=bool(wanted)) if reason is None else None
        # A call may begin others of the same model: assistants, processors of logits. Those are not the last call.
        calls = self._calls.__dict__.setdefault("stack", [])
        if reason is not None and (wanted or not calls):
            self.decline(reason, bool(wanted))
        calls.append(call)
        try:
            yield
        finally:
            calls.pop()
            if call is not None:
                if call.began:
                    call.end()
                self._in_use.release()

    def accept(
        self, model: Any, config: GenerationConfig, cache: Cache | None, mode: GenerationMode, max_length: int
    ) -> None:
        """Have the call that was offered capture its step, now that all arguments are known, or say why not."""
        call = next(reversed(self._calls.__dict__.get("stack", [])), None)
        if call is None or call.began:
            return
        reason = _why_not_this_call(config, cache, mode, call.required)
        if reason is None and self._failed is not None and self._failed[0] == Fingerprint(model):
            reason = self._failed[1]
        if reason is not None:
            return self.decline(reason, call.required)
        config.disable_compile = True
        call.begin(cache, max_length, self)

    def decline(self, reason: str, required: bool) -> None:
        """Note why a call runs the ordinary loop; ValueError if it must not."""
        if required:
            raise ValueError(f"capture_step=True cannot act: {reason}")
        self.last = f"the ordinary loop: {reason}"

    def state_for(self, model: Any, filled: Cache, rows: int, max_length: int) -> "_FixedState":
        """An empty static cache, that of an earlier call with the step captured over it if they fit.

        Args:
            model: that generates.
            filled: the cache that will be moved there.
            rows: of the batch.
            max_length: tokens that softmax layers need room for.

        Raises:
            ValueError: there is none for this model, or no memory for it.
        """
        state, self._kept = self._kept, None
        if state is not None and state.serves(model, rows, max_length):
            state.cache.reset()
            return state
        del state
        _check_room(filled, max_length, model.device)
        return _FixedState(fixed_cache(model, max_length), rows)

    def keep(self, state: "_FixedState", device: torch.device) -> None:
        """Leave a captured step for the next call, unless it takes much memory."""
        if state.fingerprint is not None and state.nbytes <= _total_bytes(device) // _KEPT_SHARE:
            self._kept = state

    def failed(self, model: Any, error: Exception) -> None:
        """Remember that the model's step cannot be captured as it is."""
        reason = f"capturing the step failed ({str(error).splitlines()[0]})"
        self._failed = Fingerprint(model), reason
        self.last = f"the ordinary loop: {reason}"


def _why_not_these_arguments(kwargs: Mapping[str, Any]) -> str | None:
    if kwargs.get("custom_generate") is not None:
        return "custom_generate brings a loop of its own"
    if kwargs.get("synced_gpus"):
        return "synced_gpus keeps several processes in step"
    return None


def _why_not_this_call(
    config: GenerationConfig, cache: Cache | None, mode: GenerationMode, required: bool
) -> str | None:
    if config.is_assistant or mode is GenerationMode.ASSISTED_GENERATION:
        return "assisted decoding takes tokens back"
    if mode not in _ONE_TOKEN_AT_A_TIME:
        return f"{mode.value} is no plain sampling or beam search"
    if cache is None:
        return "use_cache=False keeps no state"
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(config, name):
            return f"{name}=True asks a step for more than its logits"
    if config.compile_config is not None:
        return "compile_config asks for transformers' own compilation"
    if required:
        return _why_not_this_cache(cache)
    if config.cache_implementation is not None:
        return f"cache_implementation={config.cache_implementation!r} was asked for"
    if getattr(cache, "_is_user_defined", False):
        return "past_key_values was given"
    if config.return_dict_in_generate:
        return "return_dict_in_generate=True hands out the cache"
    return _why_not_this_cache(cache)


def _why_not_this_cache(cache: Any) -> str | None:
    if type(cache) is StaticCache:
        try:
            check_fixed(cache)
        except ValueError as error:
            return str(error)
        return None
    if type(cache) is not DynamicCache:
        return f"the cache is a {type(cache).__name__}"
    if cache.offloading:
        return "the cache is offloaded"
    layers: list[Any] = cache.layers
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DeltaRuleCacheLayer):
            return f"the cache has a {type(layer).__name__}"
        if layer.is_initialized:
            return "the cache has been used"
    return None


def _check_room(cache: Cache, max_length: int, device: torch.device) -> None:
    needed, free = bytes_when_fixed(cache, max_length), _free_bytes(device)
    if 2 * needed > free:
        raise ValueError(
            f"room for the keys and values of {max_length} tokens takes {needed / 2**30:.1f} GiB at once, and "
            f"{free / 2**30:.1f} GiB are free"
        )


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return sys.maxsize
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _total_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else sys.maxsize


class _FixedState:
    """A static cache at its addresses and the step captured over it.

    Args:
        cache: as `fixed_cache` makes it.
        rows: of a batch.
    """

    def __init__(self, cache: StaticCache, rows: int) -> None:
        self.cache = cache
        self.rows = rows
        lengths = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)]
        self.max_length = min(lengths, default=sys.maxsize)
        self.fingerprint: Fingerprint | None = None
        self._arguments: object = None

    def serves(self, model: Any, rows: int, max_length: int) -> bool:
        """Whether the step captured in an earlier call is the model's still, and its cache fits."""
        return self.rows == rows and self.max_length >= max_length and self.fingerprint == Fingerprint(model)

    def is_captured_with(self, arguments: object) -> bool:
        """Whether the captured step, if there is one, is one with these arguments, as `_without_values` has them."""
        return self.fingerprint is not None and self._arguments == arguments

    def capture(self, model: Any, forward: Any, kwargs: Mapping[str, Any]) -> None:
        """Capture what `forward` does with one token and these arguments, whose tensors' values may change."""
        self.fingerprint = None
        self._inputs = {name: x.clone() for name, x in _tensors_in(kwargs).items()}
        self._fixed = FixedTensors(self.cache)
        self._projections = projections = MergedProjections(model)
        fixed_kwargs = _with_tensors(kwargs, self._inputs)

        def step() -> None:
            with projections.active():
                self._logits = forward(**fixed_kwargs).logits

        self._replay = capture(step, self._fixed.changed)
        self._arguments = _without_values(kwargs)
        self.fingerprint = Fingerprint(model)

    def replay(self, kwargs: Mapping[str, Any]) -> Tensor:
        """The logits after one more token; the next replay overwrites them."""
        self._fixed.put_back()
        for name, x in _tensors_in(kwargs).items():
            self._inputs[name].copy_(x)
        with torch.cuda.device_of(self._inputs["input_ids"]):  # the current device need not be the model's
            self._replay()
        return self._logits

    @property
    def nbytes(self) -> int:
        """Memory of the cache."""
        return self._fixed.nbytes


class _Call:
    """One call of `generate`: stands in for the model's `forward` from `begin` to `end`.

    Args:
        model: that generates.
        required: whether a step that cannot be captured is an error.
    """

    def __init__(self, model: Any, required: bool) -> None:
        update_wrapper(self, model.forward)
        self.model = model
        self.forward = model.forward
        self.required = required
        self.began = False
        self._source: Cache | None = None
        self._state: _FixedState | None = None
        self._captures = 0

    def begin(self, cache: Any, max_length: int, steps: CapturedSteps) -> None:
        """Take the place of `forward`.

        Args:
            cache: that `generate` fills with the prompt.
            max_length: tokens that will be in it at most.
            steps: of the model.
        """
        self.began = True
        self._steps = steps
        self._replaced = vars(self.model).get("forward")  # a hook of accelerate, or compiled code
        if type(cache) is StaticCache:
            self._state = _FixedState(cache, 0)
        else:
            self._source = cache
            self._max_length = -(-max_length // _ROOM) * _ROOM
        self._users_own = self._source is None
        self.model.forward = self
        steps.last = "no step was needed"

    def end(self) -> None:
        """Give `forward` back."""
        del self.model.forward
        if self._replaced is not None:
            self.model.forward = self._replaced
        if self._state is not None and not self._users_own and graphs_run_on(self.model.device):
            self._steps.keep(self._state, self.model.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if args or cache is None or torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if cache is self._source:
            return self._prompt(kwargs)
        ids = kwargs.get("input_ids")
        one_token = ids is not None and ids.shape[1] == 1
        if one_token and self._state is not None and cache is self._state.cache and _is_filled(cache):
            return self._step(self._state, kwargs)
        return self.forward(**kwargs)

    def _prompt(self, kwargs: Mapping[str, Any]) -> Any:
        """The ordinary forward pass, and then its cache moved to where steps are captured."""
        outputs = self.forward(**kwargs)
        source, self._source = self._source, None
        try:
            state = self._steps.state_for(self.model, source, len(outputs.logits), self._max_length)  # type: ignore[arg-type]
        except ValueError as error:
            self._steps.decline(str(error), self.required)
            return outputs
        move_cache(source, state.cache)  # type: ignore[arg-type]
        outputs.past_key_values = state.cache
        self._state = state
        return outputs

    def _step(self, state: _FixedState, kwargs: Mapping[str, Any]) -> Any:
        if not state.is_captured_with(_without_values(kwargs)):
            if self._captures == _CAPTURES:
                return self.forward(**kwargs)
            self._captures += 1
            try:
                state.capture(self.model, self.forward, kwargs)
            except RuntimeError as error:
                if self.required:
                    raise
                self._captures = _CAPTURES
                self._steps.failed(self.model, error)
                return self.forward(**kwargs)
        self._steps.last = "captured"
        return CausalLMOutputWithPast(logits=state.replay(kwargs), past_key_values=state.cache)


def _is_filled(cache: Any) -> bool:
    return all(
        layer.state is not None if isinstance(layer, DeltaRuleCacheLayer) else layer.is_initialized
        for layer in cache.layers
    )


def _tensors_in(kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors among the arguments of a forward pass, those of a dict of masks included, by name."""
    found = {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}
    masks = kwargs.get("attention_mask")
    if isinstance(masks, Mapping):
        found |= {f"attention_mask.{name}": x for name, x in masks.items() if isinstance(x, Tensor)}
    return found


def _with_tensors(kwargs: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same arguments with the tensors of `_tensors_in` exchanged."""
    exchanged = {name: tensors.get(name, x) for name, x in kwargs.items()}
    masks = kwargs.get("attention_mask")
    if isinstance(masks, Mapping):
        exchanged["attention_mask"] = {name: tensors.get(f"attention_mask.{name}", x) for name, x in masks.items()}
    return exchanged


def _without_values(kwargs: Mapping[str, Any]) -> object:
    """What must not change from one step to the next: kinds of tensors, and all other arguments but the cache."""
    kinds = {name: (x.shape, x.dtype, x.device) for name, x in _tensors_in(kwargs).items()}
    others = {name: x for name, x in kwargs.items() if not isinstance(x, Tensor | Mapping | Cache)}
    return kinds, others
