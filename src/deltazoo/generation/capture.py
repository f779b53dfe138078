"""CUDA graphs, which launch the work of a whole function at once, and results that the host reads later.

A step over one token is thousands of launches of microseconds each; a graph of them is one launch. A graph reads and
writes fixed addresses, and repeats the work that the device was given during the capture. It repeats nothing else that
Python did.
"""

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = ("_local_scalar_dense", "nonzero", "lift_fresh", "equal", "masked_select", "_unique2", "unique_dim")
"""Operations that make the host wait for a device."""
_INDEXING = ("index", "index_put", "index_put_")
"""Operations that make the host wait if an index is a mask, whose true entries must be counted."""
_GROUPED = "_grouped_mm"
"""The product of experts. The host reads their numbers of tokens unless a kernel computes it, as in bfloat16."""
_capturing = threading.RLock()
"""A lock held during a capture: torch's allocator takes one at a time."""


def graphs_run_on(device: torch.device) -> bool:
    """Whether `capture` makes a CUDA graph on a device."""
    return device.type == "cuda"


class NoWaiting(TorchDispatchMode):
    """A context in which operations that make the host wait for a device raise RuntimeError.

    A capture fails at such an operation, too, but leaves torch's allocator in an unfinished state.

    Args:
        device: device whose tensors are watched; tests watch the CPU.
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


def capture_graph(
    function: Callable[[], object], stream: torch.cuda.Stream, *, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """A graph of one call of a function, which has run before, so that its kernels are compiled.

    Other threads may use the device meanwhile. Afterwards, also after an error, the current stream is the former one,
    and waits for `stream`.

    Args:
        function: a function whose tensors stay at their addresses, and which never waits for the device.
        stream: stream of the current device on which the function is captured.
        pool: memory that the graph shares with others, `torch.cuda.graph_pool_handle()`; its own unless given.

    Raises:
        RuntimeError: the function waits for the device, or memory runs out.
    """
    current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    try:
        with _capturing, _no_collection(), recording:
            function()
    except BaseException:
        torch.cuda.set_stream(current)  # a capture that fails leaves its own stream current
        raise
    finally:
        # torch zeroes its generator's offset on the capture's stream and sets it at a replay on the current one.
        current.wait_stream(stream)
    return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """A context without garbage collection, which might free a CUDA graph and so spoil a capture in this thread."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture(
    step: Callable[[], None],
    changed: Sequence[Tensor],
) -> Callable[[], object]:
    """A function with the effect of `step`: on a GPU a CUDA graph of it, elsewhere `step` itself.

    Args:
        step: a function over tensors that stay at their addresses, which never waits for the device.
        changed: tensors whose values the step changes and reads again. This call restores them.

    Raises:
        RuntimeError: the step waits for the device, or memory runs out.
    """
    device = changed[0].device
    if not graphs_run_on(device):
        return step
    with torch.cuda.device(device):
        before = [x.clone() for x in changed]
        stream = torch.cuda.Stream()
        try:
            with beside_current(stream):
                step()  # compiles the kernels
                _copy_all(before, changed)
                with NoWaiting(device):
                    step()
                _copy_all(before, changed)
            return capture_graph(step, stream).replay
        except BaseException:
            _copy_all(before, changed)
            raise


@contextmanager
def beside_current(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """A context in which a stream, if given, is the current one; both streams wait for each other's work."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


def _copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def free_bytes(device: torch.device) -> int:
    """Bytes that torch can still allocate on a GPU; infinity elsewhere."""
    if device.type != "cuda":
        return sys.maxsize
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def read_later(x: Tensor) -> Callable[[], Tensor]:
    """A function that returns a copy of a tensor on the host, begun now; it waits for that copy alone.

    Args:
        x: a tensor, which operations that follow may overwrite.
    """
    if x.device.type != "cuda":
        copied = x.detach().clone()
        return lambda: copied
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    wait = wait_for(x.device)

    def read() -> Tensor:
        wait()
        return host

    return read


def wait_for(device: torch.device) -> Callable[[], None]:
    """A function that waits for the work that the device has been given until now."""
    if device.type != "cuda":
        return lambda: None
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    return done.synchronize
