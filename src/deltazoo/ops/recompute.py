"""Results that the backward pass computes again instead of keeping them.

A layer calls what costs little and is large (norms, activations, convolutions, gates) through `recomputable`. Inside
`recomputing`, wherever autograd would save a result of such a call, or an intermediate of it, it saves the function and
its inputs instead of the tensor. The first such tensor that the backward pass needs runs the function again. What comes
out serves all tensors of that call, and is freed with the last. If an input is itself the result of another such call,
it is not kept either.

Autograd's graph is the one it would record anyway, and there is no work per operator, only per saved tensor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from deltazoo.ops.dtypes import autocast_dtype

__all__ = ["declare_recomputable", "recomputable", "recomputing"]

T = TypeVar("T", bound=Tensor | tuple[Tensor, ...])

_MUCH_LARGER = 32


def recomputable(function: Callable[..., T], *arguments: Any) -> T:
    """Call `function(*arguments)`; inside `recomputing`, the backward pass keeps only the arguments of it.

    Args:
        function: may run twice, so it has no side effects and gives the same results both times. Inside it
            `recomputable` does nothing.
        arguments: tensors, all that the results depend on, weights included; options among them are kept as they are.
    """
    if torch.compiler.is_compiling():
        return function(*arguments)
    recording = _ACTIVE.get()
    if recording is None or recording.running is not None:
        return function(*arguments)
    return recording.run(function, arguments)


def declare_recomputable(result: Tensor, function: Callable[..., Tensor], *arguments: Any) -> None:
    """Say that `result`, however it came about, is `function(*arguments)`; inside `recomputing` that replaces it.

    Args:
        result: not among the arguments, of a storage of its own.
        function, arguments: as of `recomputable`.
    """
    recording = None if torch.compiler.is_compiling() else _ACTIVE.get()
    if recording is not None and recording.running is None:
        recording.declare(result, *_of_tensors(function, arguments))


def _of_tensors(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Tensor]]:
    """The function of the tensors among its arguments alone, and these. It holds no tensor."""
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
    """Let `recomputable` act within this context, in this thread, if gradients are recorded.

    Hooks on saved tensors that are active outside (offloading, other checkpointing) do not see what is saved inside.
    """
    if not torch.is_grad_enabled():
        yield
        return
    recording = _Recording()
    token = _ACTIVE.set(recording)
    try:
        with saved_tensors_hooks(recording.pack, _open):
            yield
    finally:
        _ACTIVE.reset(token)
        recording.forget()


class _Saved(Protocol):
    """What autograd holds instead of a tensor."""

    def value(self) -> Tensor: ...


def _open(saved: _Saved) -> Tensor:
    return saved.value()


class _Kept:
    """The tensor itself. With hooks autograd does not check that it is unchanged, so this class does."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a tensor of the graph would hold the node that holds this object, a reference cycle.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def value(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} of shape {list(self.tensor.shape)} is at version {self.tensor._version}, "
                f"expected {self.version}"
            )
        return self.tensor


class _Rerun(NamedTuple):
    """The tensors of a call after its function ran again."""

    results: tuple[Tensor, ...]
    saved: list[Tensor]
    """What autograd saved while it ran, in order."""
    casts: dict[tuple[int, torch.dtype], Tensor]
    """Results in the dtypes that autocast cast them to, by number; several matrix products read one of them."""

    def result(self, number: int, dtype: torch.dtype) -> Tensor:
        """A result as it was saved."""
        result = self.results[number]
        if result.dtype == dtype:
            return result
        if (number, dtype) not in self.casts:
            self.casts[number, dtype] = result.to(dtype)
        return self.casts[number, dtype]


class _Call:
    """A function and its inputs. Only handles refer to it, so it is freed when autograd needs none of its tensors."""

    __slots__ = ("autocast", "function", "handles", "inputs", "needs_intermediates", "num_saved", "rerun", "unread")

    def __init__(
        self,
        function: Callable[..., Tensor | tuple[Tensor, ...]],
        inputs: list[tuple[_Saved, bool]],
        autocast: torch.dtype | None,
    ) -> None:
        self.function = function
        self.inputs = inputs
        """Each with whether it requires a gradient."""
        self.autocast = autocast
        self.num_saved = 0
        self.needs_intermediates = False
        """Whether a handle needs an intermediate, not only results."""
        self.handles = self.unread = 0
        self.rerun: _Rerun | None = None

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
        inputs = [saved.value() for saved, _ in self.inputs]
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


class _Intermediate:
    """Handle of a tensor that autograd saved inside a call."""

    __slots__ = ("call", "number")

    def __init__(self, call: _Call, number: int) -> None:
        call.handles += 1
        call.needs_intermediates = True
        self.call = call
        self.number = number

    def value(self) -> Tensor:
        return self.call.tensors().saved[self.number]


class _Source(NamedTuple):
    """A result of a call; kept during the forward pass, so that its storage is not reused for another tensor."""

    call: _Call
    number: int
    tensor: Tensor
    version: int


class _Result:
    """Handle of a call's result or of a view of it, possibly cast to another dtype before."""

    __slots__ = ("call", "dtype", "geometry", "number")

    def __init__(self, source: _Source, view: Tensor) -> None:
        source.call.handles += 1
        self.call = source.call
        self.number = source.number
        self.dtype = view.dtype
        self.geometry = (view.shape, view.stride(), view.storage_offset())

    def value(self) -> Tensor:
        return self.call.tensors().result(self.number, self.dtype).as_strided(*self.geometry)


class _Recording:
    """The calls of one forward pass, by the storages of their results."""

    def __init__(self) -> None:
        self.running: _Call | None = None
        self.inputs: set[int] = set()
        """Storages of the running call's inputs."""
        self.small = 0
        """Tensors of up to so many elements are kept anyway: a root mean square per token, a mask, an index."""
        self.sources: dict[int, _Source] = {}
        """Results, by storage."""
        self.cast_sources: dict[tuple[object, int], _Source] = {}
        """Under autocast: results by their node and output number in the graph."""

    def run(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        of_tensors, tensors = _of_tensors(function, arguments)
        self.running = call = self._call(of_tensors, tensors)
        self.inputs = {_storage(x) for x in tensors}
        self.small = max(x.numel() for x in tensors) // _MUCH_LARGER
        try:
            results = function(*arguments)
        finally:
            self.running = None
        for number, y in enumerate(_as_tuple(results)):
            if type(y) is Tensor and _storage(y) not in self.inputs:
                self._add_source(call, number, y)
        return results

    def declare(self, result: Tensor, function: Callable[..., Tensor], tensors: list[Tensor]) -> None:
        """Take `function` for what made `result`."""
        if type(result) is Tensor:
            self._add_source(self._call(function, tensors), 0, result)

    def _call(self, function: Callable[..., Any], tensors: list[Tensor]) -> _Call:
        autocast = autocast_dtype(tensors[0].device)
        return _Call(function, [(self._save(x), x.requires_grad) for x in tensors], autocast)

    def _add_source(self, call: _Call, number: int, y: Tensor) -> None:
        source = self.sources[_storage(y)] = _Source(call, number, y, y._version)
        if call.autocast is not None and y.grad_fn is not None:
            self.cast_sources[y.grad_fn, y.output_nr] = source

    def pack(self, x: Tensor) -> _Saved:
        """What autograd holds instead of `x`."""
        call = self.running
        if call is None:
            return self._save(x)
        call.num_saved += 1
        if x.numel() <= self.small or _storage(x) in self.inputs:
            return self._save(x)
        return _Intermediate(call, call.num_saved - 1)

    def _save(self, x: Tensor) -> _Saved:
        source = self.sources.get(_storage(x))
        if source is not None and source.tensor.dtype == x.dtype and source.version == x._version:
            return _Result(source, x)
        if self.cast_sources and (source := self._cast_source(x)) is not None:
            return _Result(source, x)
        return _Kept(x)

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
        """Free the results: no further tensor will be compared with them."""
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
