"""A decoding step of a model as one CUDA graph.

The step works on a static cache (`deltazoo.generation.static_cache`) and on input tensors that stay. A `Fingerprint`
tells whether a graph of an earlier call still does what the model would do.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from deltazoo.generation.capture import capture
from deltazoo.generation.fused_blocks import FusedBlocks
from deltazoo.generation.library_modules import LibraryModules
from deltazoo.generation.merged_projections import MergedProjections
from deltazoo.generation.one_thread import alone_with
from deltazoo.generation.static_cache import FixedTensors

__all__ = ["CapturedStep", "Fingerprint"]

_UNCOMPARED = {*vars(nn.Module()), "forward", "_captured_steps"} - {"training"}
"""Attributes that every module may have. What of them matters to a captured step is compared separately, or keeps steps
from being captured (`deltazoo.generation.capture_conditions`)."""


class CapturedStep:
    """A decoding step, captured once and replayed for every token.

    On a GPU it is a CUDA graph, without a reference to the model; elsewhere it is the function itself. Linear maps of
    one input run merged within the step (`MergedProjections`), blocks fused where they can (`FusedBlocks`), and norms
    and MLPs of transformers in our kernels (`LibraryModules`).

    Args:
        model: whose layers the step runs; in evaluation mode.
        step: runs the model over tensors that stay where they are, and never waits for the device.
        cache: the static cache that the step works on, after its first tokens.
        changed: the other tensors whose values the step changes and reads again.
        generators: random number generators that the step draws from.
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
        generators: Sequence[torch.Generator] = (),
        *,
        compiled: bool = False,
    ) -> None:
        self.output: Any = None
        self.cache_tensors = FixedTensors(cache)
        changed = [*self.cache_tensors.changed, *changed]
        self._device_index = changed[0].get_device()  # -1 for the CPU, which `torch.cuda.device` leaves alone
        alone = alone_with(model)
        with alone:
            self._projections = projections = MergedProjections(model)  # kept, as a graph reads the merged weights
            # Compiled code fuses by itself, and has been traced through the modules' own forward passes.
            blocks = nullcontext if compiled else FusedBlocks(model, projections).active
            others = nullcontext if compiled else LibraryModules(model).active

            def merged_step() -> None:
                with alone, blocks(), others(), projections.active():
                    self.output = step()

            self._replay = capture(merged_step, changed, generators, compiled=compiled)
            self._fingerprint = Fingerprint(model)

    def is_valid_for(self, model: Any) -> bool:
        """Whether a replay still does what the model would do now."""
        return self._fingerprint == Fingerprint(model)

    def replay(self) -> None:
        """Do the step once more."""
        with torch.cuda.device(self._device_index):  # a graph is replayed on the current device
            self._replay()


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
