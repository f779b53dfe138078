"""Results that the backward pass computes again instead of keeping them.

A layer calls functions that cost little and have large results (norms, activations, convolutions, gates) through
`recomputable`. Inside `recomputing`, wherever autograd would save a result of such a call, or an intermediate tensor,
it saves the function and its inputs instead. The first such tensor that the backward pass needs runs the function
again. Its results serve all tensors of that call, and are freed with the last. An input that is itself the result of
another such call is not kept either.

Autograd's graph does not change, and the additional work is per saved tensor, not per operator.
"""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from deltazoo.ops.dtypes import autocast_dtype

T = TypeVar("T", bound=Tensor | tuple[Tensor, ...])

_MUCH_LARGER = 32


def recomputable(function: Callable[..., T], *arguments: Any) -> T:
    """The result of `function(*arguments)`; inside `recomputing`, the backward pass keeps only the arguments.

    Args:
        function: a function without side effects and with equal results when it runs twice. Inside it `recomputable`
            does nothing.
        arguments: all tensors on which the results depend, weights included, and options.
    """
    if torch.compiler.is_compiling():
        return function(*arguments)
    recording = _ACTIVE.get()
    if recording is None or recording.running is not None:
        return function(*arguments)
    return recording.run(function, arguments)


def declare_recomputable(result: Tensor, function: Callable[..., Tensor], *arguments: Any) -> None:
    """Declare that `result` equals `function(*arguments)`, which replaces it inside `recomputing`.

    Args:
        result: a tensor with a storage of its own, not among the arguments.
        function, arguments: see `recomputable`.
    """
    recording = None if torch.compiler.is_compiling() else _ACTIVE.get()
    if recording is not None and recording.running is None and type(result) is Tensor:
        recording.add_source(recording.call(*_of_tensors(function, arguments)), 0, result)


def _of_tensors(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Tensor]]:
    """A function of the tensors alone among the arguments, and these tensors. The function holds no tensor."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if len(tensors) == len(arguments):
        return function, tensors
    options = [None if isinstance(x, Tensor) else (x,) for x in arguments]

    def call(*tensors: Tensor) -> Any:
        given = iter(tensors)
        return function(*[next(given) if option is None else option[0] for option in options])

    return call, tensors


@contextmanager
def recomputing() -> Iterator[None]:
    """A context in which `recomputable` acts, in this thread, if gradients are recorded.

    Hooks on saved tensors that are active outside (offloading, other checkpointing) do not see what is saved inside.
    """
    if not torch.is_grad_enabled():
        yield
        return
    recording = _Recording()
    token = _ACTIVE.set(recording)
    try:
        with saved_tensors_hooks(recording.pack, operator.call):
            yield
    finally:
        _ACTIVE.reset(token)
        recording.forget()


_Saved = Callable[[], Tensor]
"""A handle that autograd holds in place of a tensor, and that returns the tensor."""


def _kept(x: Tensor) -> _Saved:
    """A handle of the tensor itself. With hooks autograd does not check that it is unchanged, so the handle does."""
    # The tensor is detached: in the graph it would hold the node that holds this handle, a reference cycle.
    tensor, version = x if x.is_leaf else x.detach(), x._version

    def unchanged() -> Tensor:
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tensor.dtype} of shape {list(tensor.shape)} is at version {tensor._version}, expected {version}"
            )
        return tensor

    return unchanged


class _Rerun(NamedTuple):
    """The tensors of a call after its function ran again."""

    results: tuple[Tensor, ...]
    saved: list[Tensor]
    """Tensors that autograd saved while it ran, in order."""
    casts: dict[tuple[int, torch.dtype], Tensor]
    """Results in the dtypes of autocast, by number and dtype; several matrix products read one of them."""

    def result(self, number: int, dtype: torch.dtype) -> Tensor:
        """A result, in the dtype in which it was saved."""
        result = self.results[number]
        if result.dtype == dtype:
            return result
        if (number, dtype) not in self.casts:
            self.casts[number, dtype] = result.to(dtype)
        return self.casts[number, dtype]


@dataclass(slots=True, eq=False)
class _Call:
    """A function and its inputs. Only handles refer to it, so it is freed when autograd needs none of its tensors."""

    function: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: list[tuple[_Saved, bool]]
    """Handle of each input, and whether it requires a gradient."""
    autocast: torch.dtype | None
    num_saved: int = 0
    needs_intermediates: bool = False
    """Whether a handle needs an intermediate tensor, not only results."""
    handles: int = 0
    unread: int = 0
    rerun: _Rerun | None = None

    def intermediate(self, number: int) -> _Saved:
        """A handle of a tensor that autograd saved inside the call."""
        self.handles += 1
        self.needs_intermediates = True
        return lambda: self.tensors().saved[number]

    def result(self, number: int, view: Tensor) -> _Saved:
        """A handle of a result or of a view of it, possibly cast to another dtype before."""
        self.handles += 1
        dtype, geometry = view.dtype, (view.shape, view.stride(), view.storage_offset())
        return lambda: self.tensors().result(number, dtype).as_strided(*geometry)

    def tensors(self) -> _Rerun:
        """The tensors for one handle. The first handle that is read runs the function again."""
        if self.rerun is None:
            self.rerun, self.unread = self._run(), self.handles
        rerun = self.rerun
        self.unread -= 1
        if self.unread == 0:  # with retain_graph the handles may be read again
            self.rerun = None
        return rerun

    def _run(self) -> _Rerun:
        inputs = [saved() for saved, _ in self.inputs]
        device = inputs[0].device
        same = autocast_dtype(device) == self.autocast
        with nullcontext() if same else torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            if self.needs_intermediates:
                return self._record(inputs)
            with torch.no_grad():
                return _Rerun(_as_tuple(self.function(*inputs)), [], {})

    def _record(self, inputs: list[Tensor]) -> _Rerun:
        saved: list[Tensor] = []
        inputs = [x.detach().requires_grad_(wanted) for x, (_, wanted) in zip(inputs, self.inputs, strict=True)]
        with torch.enable_grad(), saved_tensors_hooks(lambda x: saved.append(x.detach()), _never):
            results = _as_tuple(self.function(*inputs))
        if len(saved) != self.num_saved:
            raise RuntimeError(f"{self.function} saved {self.num_saved} tensors, and {len(saved)} when it ran again")
        return _Rerun(tuple(y.detach() for y in results), saved, {})


class _Source(NamedTuple):
    """A result of a call; kept during the forward pass, so that its storage is not reused for another tensor."""

    call: _Call
    number: int
    tensor: Tensor
    version: int


class _Recording:
    """The calls of one forward pass, by the storages of their results."""

    def __init__(self) -> None:
        self.running: _Call | None = None
        self.inputs: set[int] = set()
        """Storages of the running call's inputs."""
        self.small = 0
        """Elements up to which tensors are kept: a root mean square per token, a mask, an index."""
        self.sources: dict[int, _Source] = {}
        """Results by storage."""
        self.cast_sources: dict[tuple[object, int], _Source] = {}
        """Results under autocast, by node and output number in the graph."""

    def run(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        """The results of a function, after recording the call that made them."""
        of_tensors, tensors = _of_tensors(function, arguments)
        self.running = call = self.call(of_tensors, tensors)
        self.inputs = {_storage(x) for x in tensors}
        self.small = max(x.numel() for x in tensors) // _MUCH_LARGER
        try:
            results = function(*arguments)
        finally:
            self.running = None
        for number, y in enumerate(_as_tuple(results)):
            if type(y) is Tensor and _storage(y) not in self.inputs:
                self.add_source(call, number, y)
        return results

    def call(self, function: Callable[..., Any], tensors: list[Tensor]) -> _Call:
        """The record of `function(*tensors)`."""
        autocast = autocast_dtype(tensors[0].device)
        return _Call(function, [(self._save(x), x.requires_grad) for x in tensors], autocast)

    def add_source(self, call: _Call, number: int, y: Tensor) -> None:
        """Record y as a result of the call."""
        source = self.sources[_storage(y)] = _Source(call, number, y, y._version)
        if call.autocast is not None and y.grad_fn is not None:
            self.cast_sources[y.grad_fn, y.output_nr] = source

    def pack(self, x: Tensor) -> _Saved:
        """A handle for autograd in place of `x`."""
        call = self.running
        if call is None:
            return self._save(x)
        call.num_saved += 1
        if x.numel() <= self.small or _storage(x) in self.inputs:
            return self._save(x)
        return call.intermediate(call.num_saved - 1)

    def _save(self, x: Tensor) -> _Saved:
        source = self.sources.get(_storage(x))
        if source is not None and source.tensor.dtype == x.dtype and source.version == x._version:
            return source.call.result(source.number, x)
        if self.cast_sources and (source := self._cast_source(x)) is not None:
            return source.call.result(source.number, x)
        return _kept(x)

    def _cast_source(self, x: Tensor) -> _Source | None:
        """The result of which x is a cast, made by autocast for a matrix product, or a view of that cast."""
        cast = x if x._base is None else x._base
        if cast.grad_fn is None or cast.grad_fn.name() != "ToCopyBackward0" or cast._version:
            return None
        source = self.cast_sources.get(cast.grad_fn.next_functions[0])
        if source is None or source.tensor._version != source.version:
            return None
        same_form = (source.tensor.device, source.tensor.stride()) == (cast.device, cast.stride())
        return source if same_form else None

    def forget(self) -> None:
        """Free the results, since no further tensor will be compared with them."""
        self.sources.clear()
        self.cast_sources.clear()


_ACTIVE: ContextVar[_Recording | None] = ContextVar("recording", default=None)


def _storage(x: Tensor) -> int:
    """A number that identifies a storage while it exists, also one of size 0."""
    return x.untyped_storage()._cdata


def _as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _never(saved: object) -> NoReturn:
    raise AssertionError("nothing runs backward through this graph")
