"""A decoding step of a model as one CUDA graph.

A step over one token is thousands of launches of microseconds each; a graph of them is one launch. A graph reads and
writes fixed addresses, so the step works on a static cache (`deltazoo.generation.static_cache`) and on input tensors
that stay. It repeats what the device was told while it was captured, and nothing else that Python did. A `Fingerprint`
tells whether a graph of an earlier call still does what the model would do.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from deltazoo.generation.fused_blocks import FusedBlocks
from deltazoo.generation.library_modules import LibraryModules
from deltazoo.generation.merged_projections import MergedProjections
from deltazoo.generation.one_thread import alone_with
from deltazoo.generation.static_cache import FixedTensors

__all__ = ["CapturedStep", "Fingerprint", "NoWaiting", "capture", "graphs_run_on"]

_WAITING = ("_local_scalar_dense", "nonzero", "lift_fresh", "equal", "masked_select", "_unique2", "unique_dim")
"""Operations that make the host wait for a device."""
_INDEXING = ("index", "index_put", "index_put_")
"""Operations that wait where an index is a mask, whose true entries must be counted."""
_GROUPED = "_grouped_mm"
"""Of experts, whose numbers of tokens the host of a GPU reads unless a kernel serves, which there is for bfloat16."""
_UNCOMPARED = {*vars(nn.Module()), "forward", "_captured_steps"} - {"training"}
"""Attributes that every module may have. What of them matters to a captured step is compared separately, or keeps steps
from being captured (`deltazoo.generation.capture_conditions`)."""


def graphs_run_on(device: torch.device) -> bool:
    """Whether `capture` makes a CUDA graph there."""
    return device.type == "cuda"


class NoWaiting(TorchDispatchMode):
    """Within this context, operations that make the host wait for a device raise RuntimeError.

    A capture that meets one fails, too, but leaves torch's allocator in an unfinished state.

    Args:
        device: whose tensors to watch; tests watch the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in _INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1])
        by_dtype = name == _GROUPED and args[0].is_cuda and args[0].dtype != torch.bfloat16
        if (name in _WAITING or by_mask or by_dtype) and args[0].device.type == self.device.type:
            raise RuntimeError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def capture(
    step: Callable[[], None],
    changed: Sequence[Tensor],
    generators: Sequence[torch.Generator] = (),
    *,
    compiled: bool = False,
) -> Callable[[], object]:
    """A function that does what `step` does: on a GPU one CUDA graph of it, elsewhere `step` itself.

    Args:
        step: reads and writes tensors that stay where they are, and never waits for the device.
        changed: the tensors whose values the step changes and reads again. This call restores them and the generators.
        generators: random number generators that the step draws from.
        compiled: the step runs compiled code, which is not watched for waiting.

    Raises:
        RuntimeError: the step waits for the device, or memory runs out.
    """
    device = changed[0].device
    if not graphs_run_on(device):
        return step
    watched = nullcontext() if compiled else NoWaiting(device)
    with torch.cuda.device(device):
        return _capture_graph(step, changed, generators, watched).replay


def _capture_graph(
    step: Callable[[], None],
    changed: Sequence[Tensor],
    generators: Sequence[torch.Generator],
    watched: AbstractContextManager[Any],
) -> torch.cuda.CUDAGraph:
    before = [x.clone() for x in changed]
    random_states = [generator.get_state() for generator in generators]
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            step()  # kernels are compiled
            _copy_all(before, changed)
            with watched:
                step()
            _copy_all(before, changed)
        current.wait_stream(stream)
        for generator, state in zip(generators, random_states, strict=True):
            generator.set_state(state)
            graph.register_generator_state(generator)
        # Other threads may use the device during the capture.
        with _no_collection(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    except BaseException:
        torch.cuda.set_stream(current)  # a capture that fails leaves its own stream current
        current.wait_stream(stream)
        _copy_all(before, changed)
        for generator, state in zip(generators, random_states, strict=True):
            generator.set_state(state)
        raise
    # torch zeroes the generators' offsets on the capture's stream and sets them at a replay on the current one.
    current.wait_stream(stream)
    return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection within this context: freeing a CUDA graph would spoil a capture in this thread."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


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
