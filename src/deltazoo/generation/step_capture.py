"""A decoding step as one CUDA graph, and the caches that such a step can work on.

A one-token step is thousands of launches of microseconds each; a graph of them is one launch. A graph reads and writes
fixed addresses, as a `StaticCache` has them; the state of a delta-rule layer keeps its size at every length.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from deltazoo.generation.cache import DeltaRuleCacheLayer

__all__ = [
    "FixedTensors",
    "NoWaiting",
    "bytes_when_fixed",
    "capture",
    "check_fixed",
    "fixed_cache",
    "graphs_run_on",
    "move_cache",
]

_WAITING = ("_local_scalar_dense", "nonzero", "lift_fresh", "equal", "masked_select", "_unique2", "unique_dim")
_INDEXING = ("index", "index_put", "index_put_")
"""Where a mask is an index, its places are counted."""


def graphs_run_on(device: torch.device) -> bool:
    """Whether `capture` makes a CUDA graph there."""
    return device.type == "cuda"


class NoWaiting(TorchDispatchMode):
    """Within this context, operations that make the host wait for a device raise RuntimeError.

    A capture that meets one fails, too, but leaves torch's allocator in the middle of it.

    Args:
        device: whose tensors to watch; a CPU's for tests.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in _INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1])
        if (name in _WAITING or by_mask) and args[0].device.type == self.device.type:
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
        changed: the tensors whose values it changes and reads again. They, and the generators, come out of this call as
            they went in.
        generators: random number generators that the step draws from.
        compiled: the step runs compiled code, which is not watched for waiting.

    Raises:
        RuntimeError: the step waits for the device, or memory runs out.
    """
    if changed[0].device.type != "cuda":
        return step
    with torch.cuda.device_of(changed[0]):
        return _capture_graph(
            step, changed, generators, nullcontext() if compiled else NoWaiting(changed[0].device)
        ).replay


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
            step()  # kernels compile
            _copy_all(before, changed)
            with watched:
                step()
            _copy_all(before, changed)
        current.wait_stream(stream)
        for generator, state in zip(generators, random_states, strict=True):
            generator.set_state(state)
            graph.register_generator_state(generator)
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    except BaseException:
        torch.cuda.set_stream(current)  # a capture that fails leaves its own in place
        current.wait_stream(stream)
        _copy_all(before, changed)
        for generator, state in zip(generators, random_states, strict=True):
            generator.set_state(state)
        raise
    # torch zeroes the generators' offsets on the capture's stream and sets them at a replay on the current one.
    current.wait_stream(stream)
    return graph


def _copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def fixed_cache(model: Any, max_length: int) -> StaticCache:
    """An empty static cache of a model that a captured step can work on.

    Args:
        model: a causal language model of transformers.
        max_length: tokens that softmax layers have room for.

    Raises:
        ValueError: a layer keeps its past in a way that a graph cannot replay.
    """
    cache = StaticCache(config=model.config, max_cache_len=max_length)
    for index, layer in enumerate(cache.layers):
        # A window counts on the host, which replays do not; and masks cut the window out of all keys just as well.
        if type(layer) is StaticSlidingWindowLayer:
            cache.layers[index] = StaticLayer(max_cache_len=max_length)
    prepare = getattr(model, "prepare_cache", None)
    if prepare is not None:
        prepare(cache)
    check_fixed(cache)
    return cache


def check_fixed(cache: Cache) -> None:
    """ValueError unless a captured step can work on all layers of a static cache."""
    for layer in cache.layers:
        if type(layer) not in (StaticLayer, LinearAttentionLayer, DeltaRuleCacheLayer):
            raise ValueError(
                f"a captured step cannot work on a {type(layer).__name__} of the cache; the ordinary generate can"
            )


def bytes_when_fixed(cache: Cache, max_length: int) -> int:
    """What keys and values of a filled dynamic cache would take with room for `max_length` tokens."""
    softmax: list[Any] = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    tensors: list[Tensor] = [x for layer in softmax for x in (layer.keys, layer.values)]
    return sum(x.nbytes // x.shape[2] * max_length for x in tensors)


def move_cache(source: Cache, target: StaticCache) -> None:
    """Fill an empty static cache with what a dynamic one holds, layer by layer, and empty that."""
    source.layers, layers = [], source.layers
    layers.reverse()
    new: Any
    for new in target.layers:
        old: Any = layers.pop()  # and free its memory before the next
        if isinstance(new, DeltaRuleCacheLayer):
            new.store(old.state, old.num_tokens, target.layers)
            continue
        if not new.is_initialized:
            new.lazy_initialization(old.keys, old.values)
        # A window holds the last keys alone; they go where they would be among all.
        new.cumulative_length.fill_(old.get_seq_length() - old.keys.shape[2])
        new.update(old.keys, old.values)


class FixedTensors:
    """The tensors of a filled static cache at the addresses that a captured step knows.

    Args:
        cache: of `fixed_cache`, after its first tokens.
    """

    def __init__(self, cache: Cache) -> None:
        self._places = [place for layer in cache.layers for place in _tensors_of(layer)]

    @property
    def changed(self) -> list[Tensor]:
        """What a step changes and reads again; it writes its keys and values to the same place when it is repeated."""
        return [tensor for _, name, tensor in self._places if name not in ("keys", "values")]

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        return sum(tensor.nbytes for _, _, tensor in self._places)

    def put_back(self) -> None:
        """Undo moves: transformers' key/value layers put new tensors in place of theirs when beams change rows."""
        for owner, name, tensor in self._places:
            if owner[name] is not tensor:
                tensor.copy_(owner[name])
                owner[name] = tensor


def _tensors_of(layer: Any) -> Iterator[tuple[dict[Any, Any], Any, Tensor]]:
    """Where a cache layer keeps its tensors: attributes, and dicts of several states."""
    for owner in (vars(layer), *(x for x in vars(layer).values() if isinstance(x, dict))):
        yield from ((owner, name, x) for name, x in owner.items() if isinstance(x, Tensor))
