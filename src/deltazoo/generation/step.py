"""A decoding step of a model: its own forward pass, in which some modules compute otherwise, as one CUDA graph.

Linear maps of one input run merged within a step (`merged`), blocks fused where they can (`fused_blocks`), and norms
and MLPs of transformers in our kernels (`library_modules`). The step works on a static cache (`static_cache`) and on
input tensors that stay where they are. A `Fingerprint` tells whether a step that was captured earlier (`capture`) still
does what the model would do.

Threads share a model's modules. So one of them at a time makes or runs a step of a model, and calls from others get the
modules' own forward passes meanwhile.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, StaticCache, StaticLayer

from deltazoo.generation.capture import capture
from deltazoo.generation.fused_blocks import fused_blocks
from deltazoo.generation.library_modules import library_modules
from deltazoo.generation.merged import merged_products
from deltazoo.generation.static_cache import FixedTensors

__all__ = ["CapturedStep", "Fingerprint", "StaticDecoding", "StepModules", "alone_with"]

_UNCOMPARED = {*vars(nn.Module()), "forward", "_captured_steps"} - {"training"}
"""Attributes that every module may have. What of them matters to a captured step is compared separately, or keeps steps
from being captured (`deltazoo.generation.conditions`)."""
_of_thread = threading.local()
_locks: weakref.WeakKeyDictionary[nn.Module, AbstractContextManager[Any]] = weakref.WeakKeyDictionary()
_making_locks = threading.Lock()


class CapturedStep:
    """A decoding step, captured once and replayed for every token.

    On a GPU it is a CUDA graph, without a reference to the model; elsewhere it is the function itself.

    Args:
        model: whose layers the step runs; in evaluation mode.
        step: runs the model over tensors that stay where they are, and never waits for the device.
        cache: the static cache that the step works on, after its first tokens.
        changed: the other tensors whose values the step changes and reads again.
        compiled: the step runs compiled code, which is not watched for waiting.

    Attributes:
        cache_tensors: those of the cache, at their addresses.
        output: what the step returned; the next replay overwrites its tensors.

    Raises:
        RuntimeError: the step waits for the device, or memory runs out.
    """

    def __init__(
        self,
        model: Any,
        step: Callable[[], Any],
        cache: Cache,
        changed: Sequence[Tensor] = (),
        *,
        compiled: bool = False,
    ) -> None:
        self.output: Any = None
        self.cache_tensors = FixedTensors(cache)
        changed = [*self.cache_tensors.changed, *changed]
        self._device_index = changed[0].get_device()  # -1 for the CPU, which `torch.cuda.device` leaves alone
        alone = alone_with(model)
        with alone:
            self._products = products = merged_products(model)  # kept, as a graph reads the merged weights
            # Compiled code fuses by itself, and has been traced through the modules' own forward passes.
            parts: list[Part] = [*products]
            if not compiled:
                parts += [*fused_blocks(model, products), *library_modules(model)]
            modules = StepModules(parts)

            def run() -> None:
                with alone, modules.replaced():
                    self.output = step()

            self._replay = capture(run, changed, compiled=compiled)
            self._fingerprint = Fingerprint(model)

    def is_valid_for(self, model: Any) -> bool:
        """Whether a replay still does what the model would do now."""
        return self._fingerprint == Fingerprint(model)

    def replay(self) -> None:
        """Do the step once more."""
        with torch.cuda.device(self._device_index):  # a graph is replayed on the current device
            self._replay()


class StaticDecoding:
    """A static cache and, once it is captured, a model's step over it for one set of arguments of the forward pass.

    Args:
        cache: as `deltazoo.generation.static_cache.fixed_cache` makes it.
        rows: of the batch; None: the cache is the user's, and no other call gets it.

    Attributes:
        step: None before `capture`.
    """

    def __init__(self, cache: StaticCache, rows: int | None) -> None:
        self.cache = cache
        self.rows = rows
        lengths = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)]
        self.max_length = min(lengths, default=sys.maxsize)
        self.step: CapturedStep | None = None
        self._kinds: Any = None
        self._inputs: dict[str, Tensor] = {}

    def serves(self, model: Any, rows: int, max_length: int) -> bool:
        """Whether a new call can use the cache and the step that an earlier call captured."""
        fits = self.rows == rows and self.max_length >= max_length
        return fits and self.step is not None and self.step.is_valid_for(model)

    def capture(self, model: Any, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Capture what `forward` does with one token and these arguments, whose tensors' values may change.

        Raises:
            RuntimeError: the step waits for the device, or memory runs out; there is no captured step then.
        """
        replaced, self.step = self.step, None  # kept until the end of the call: it owns the merged weights
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
        """The logits after one more token, until the next replay; None if no step with such arguments is captured."""
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
    """The arguments of a forward pass, those of a dict of masks one by one."""
    masks = arguments.get("attention_mask")
    return {**arguments, **{_mask(name): x for name, x in masks.items()}} if isinstance(masks, Mapping) else arguments


def _kinds(given: Mapping[str, Any]) -> dict[str, Any]:
    """What must not change from one step to the next: kinds of tensors, and all other arguments but the cache."""
    return {
        name: (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x
        for name, x in given.items()
        if not isinstance(x, Mapping | Cache)
    }


class Part(Protocol):
    """Modules that compute otherwise within a step."""

    def is_current(self) -> bool:
        """Whether the modules are still as they were when the part was made."""

    def forwards(self) -> Sequence[tuple[Any, Callable[..., Tensor | None]]]:
        """The modules, each with a function of its arguments: its output, or None where its own forward pass runs."""

    def forget(self) -> None:
        """Drop what one module has made for another."""


class StepModules:
    """The modules whose forward passes are replaced within a step of a model.

    Args:
        parts: of the step; no two of them share a module.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        # Made once, since compiled code recognises the functions that it was traced with.
        self._parts = [(part, [(x, partial(_output, x, f)) for x, f in part.forwards()]) for part in parts]

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace forward passes within this context, for calls of this thread, in parts that are current."""
        current = [pair for part, pairs in self._parts if part.is_current() for pair in pairs]
        outer = getattr(_of_thread, "replaces", False)
        for module, forward in current:
            vars(module)["forward"] = forward
        _of_thread.replaces = True
        try:
            yield
        finally:
            _of_thread.replaces = outer
            for module, _ in current:
                vars(module).pop("forward", None)
            for part, _ in self._parts:  # a current one may have made something for another
                part.forget()


def _output(module: Any, compute: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor:
    here = torch.compiler.is_compiling() or getattr(_of_thread, "replaces", False)
    output = compute(*args, **kwargs) if here else None
    return type(module).forward(module, *args, **kwargs) if output is None else output


def alone_with(model: nn.Module) -> AbstractContextManager[Any]:
    """A lock, one per model: held while its modules' forward passes are replaced, or are read to make a step."""
    with _making_locks:
        return _locks.setdefault(model, threading.RLock())


class Fingerprint:
    """What a captured step relies on: a model's modules, their settings in decoding, and the addresses of weights.

    `==` compares. Weights changed in place (training, `load_state_dict`, merged adapters) leave the fingerprint as it
    is: a graph reads them anew.
    """

    def __init__(self, model: Any) -> None:
        modules = list(model.modules())
        self._modules = [weakref.ref(module) for module in modules]
        # On a GPU experts run in another implementation than for prompts.
        with alone_with(model), model._optimize_model_for_decode():
            self._rest = (
                [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in (*model.parameters(), *model.buffers())],
                [_settings(vars(module)) for module in modules],
                _settings(vars(model.config)),
                torch.is_inference_mode_enabled(),
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint) or len(self._modules) != len(other._modules):
            return False
        pairs = zip(self._modules, other._modules, strict=True)
        return all(a() is b() is not None for a, b in pairs) and self._rest == other._rest

    __hash__ = None  # type: ignore[assignment]


def _settings(values: Any) -> Any:
    """The plain values in nested lists, dicts and dataclasses; the type of everything else."""
    if is_dataclass(values) and not isinstance(values, type | PreTrainedConfig):
        values = vars(values)
    # Copies, since other threads may add attributes meanwhile.
    if isinstance(values, dict):
        return {key: _settings(value) for key, value in values.copy().items() if key not in _UNCOMPARED}
    if isinstance(values, list | tuple | set):
        return [_settings(value) for value in list(values)]
    plain = isinstance(values, bool | int | float | str | torch.dtype | torch.device | None)
    return values if plain else type(values)
