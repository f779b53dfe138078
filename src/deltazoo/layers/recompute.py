"""Results that are worked out again in the backward pass instead of kept.

A layer calls what costs little and is large (norms, activations, convolutions, gates) through `recomputable`. Inside
`recomputing`, wherever autograd would save a result of such a call, or something on the way to it, it saves a note of
how to come by it. The first note that the backward pass opens runs the function once more; what comes out serves all
of its notes and goes with the last. The inputs of a call are kept, or notes themselves if they are results of another.

Autograd's graph is the one it would record anyhow, and there is no work per operator, only per saved tensor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["recomputable", "recomputing"]

T = TypeVar("T", bound=Tensor | tuple[Tensor, ...])

_MUCH_LARGER = 32


def recomputable(function: Callable[..., T], *tensors: Tensor) -> T:
    """`function(*tensors)`; inside `recomputing`, only `tensors` are kept of it for the backward pass.

    Args:
        function: may run twice, so it has no side effects and gives the same results both times. Inside it
            `recomputable` does nothing.
        tensors: what the results depend on, weights included.
    """
    if torch.compiler.is_compiling():
        return function(*tensors)
    recording = _ACTIVE.get()
    if recording is None or recording.running is not None:
        return function(*tensors)
    return recording.run(function, tensors)


@contextmanager
def recomputing() -> Iterator[None]:
    """Let `recomputable` act on what this thread runs in here, if gradients are recorded.

    Hooks on saved tensors from outside (offloading, others' checkpoints) do not see what is saved in here.
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
    """What autograd holds in place of a tensor."""

    def value(self) -> Tensor: ...


def _open(saved: _Saved) -> Tensor:
    return saved.value()


class _Kept:
    """The tensor itself. Behind hooks autograd leaves it to us to see that nobody has changed it."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Not a tensor of the graph: it could hold the very node that is to hold this.
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


class _Outcome(NamedTuple):
    """What running a function again has given."""

    results: tuple[Tensor, ...]
    saved: list[Tensor]
    """What autograd saved meanwhile, in that order."""
    casts: dict[tuple[int, torch.dtype], Tensor]
    """Results in the dtypes that autocast cast them to, by place; several matrix products read one of them."""

    def result(self, place: int, dtype: torch.dtype) -> Tensor:
        """A result as it was saved."""
        result = self.results[place]
        if result.dtype == dtype:
            return result
        if (place, dtype) not in self.casts:
            self.casts[place, dtype] = result.to(dtype)
        return self.casts[place, dtype]


class _Call:
    """A function and its inputs. Notes alone hold it, so it goes, inputs and all, when autograd needs it no more."""

    __slots__ = ("autocast", "function", "inputs", "needs_saved", "notes", "num_saved", "outcome", "unopened")

    def __init__(
        self,
        function: Callable[..., Tensor | tuple[Tensor, ...]],
        inputs: list[tuple[_Saved, bool]],
        autocast: torch.dtype | None,
    ) -> None:
        self.function = function
        self.inputs = inputs
        """With whether they want a gradient."""
        self.autocast = autocast
        self.num_saved = 0
        self.needs_saved = False
        """Whether notes ask for something on the way to the results."""
        self.notes = self.unopened = 0
        self.outcome: _Outcome | None = None

    def opened(self) -> _Outcome:
        """For one note: the function runs again for the first of them."""
        if self.outcome is None:
            self.outcome, self.unopened = self._run(), self.notes
        outcome = self.outcome
        self.unopened -= 1
        if self.unopened == 0:  # the notes may stay, with retain_graph
            self.outcome = None
        return outcome

    def _run(self) -> _Outcome:
        inputs = [saved.value() for saved, _ in self.inputs]
        device = inputs[0].device.type
        same = _autocast_dtype(device) == self.autocast
        with nullcontext() if same else torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            if self.needs_saved:
                return self._record(inputs)
            with torch.no_grad():
                return _Outcome(_as_tuple(self.function(*inputs)), [], {})

    def _record(self, inputs: list[Tensor]) -> _Outcome:
        saved: list[Tensor] = []
        inputs = [x.detach().requires_grad_(wanted) for x, (_, wanted) in zip(inputs, self.inputs, strict=True)]
        with torch.enable_grad(), saved_tensors_hooks(lambda x: saved.append(x.detach()), _never):
            results = _as_tuple(self.function(*inputs))
        if len(saved) != self.num_saved:
            raise RuntimeError(f"{self.function} saved {self.num_saved} tensors, and {len(saved)} when it ran again")
        return _Outcome(tuple(y.detach() for y in results), saved, {})


class _OnTheWay:
    """Note of a tensor that a call saved before it had its results."""

    __slots__ = ("call", "number")

    def __init__(self, call: _Call, number: int) -> None:
        call.notes += 1
        call.needs_saved = True
        self.call = call
        self.number = number

    def value(self) -> Tensor:
        return self.call.opened().saved[self.number]


class _Source(NamedTuple):
    """A result of a call; held while the forward pass lasts, so that nothing else comes to lie at its address."""

    call: _Call
    place: int
    tensor: Tensor
    version: int


class _Result:
    """Note of a call's result or a view of it, possibly cast to another dtype before."""

    __slots__ = ("call", "dtype", "geometry", "place")

    def __init__(self, source: _Source, view: Tensor) -> None:
        source.call.notes += 1
        self.call = source.call
        self.place = source.place
        self.dtype = view.dtype
        self.geometry = (view.shape, view.stride(), view.storage_offset())

    def value(self) -> Tensor:
        return self.call.opened().result(self.place, self.dtype).as_strided(*self.geometry)


class _Recording:
    """The calls of one forward pass, found again by their results."""

    def __init__(self) -> None:
        self.running: _Call | None = None
        self.inputs: set[int] = set()
        """Storages of the running call's inputs."""
        self.small = 0
        """Elements of what is kept all the same: a root mean square per token, a mask, an index."""
        self.sources: dict[int, _Source] = {}
        """Results, by storage."""
        self.cast_sources: dict[tuple[object, int], _Source] = {}
        """Under autocast, by the place in the graph that autograd gives for what a cast has cast."""

    def run(self, function: Callable[..., T], tensors: tuple[Tensor, ...]) -> T:
        autocast = _autocast_dtype(tensors[0].device.type)
        self.running = call = _Call(function, [(self._save(x), x.requires_grad) for x in tensors], autocast)
        self.inputs = {_storage(x) for x in tensors}
        self.small = max(x.numel() for x in tensors) // _MUCH_LARGER
        try:
            results = function(*tensors)
        finally:
            self.running = None
        for place, y in enumerate(_as_tuple(results)):
            if type(y) is Tensor and _storage(y) not in self.inputs:
                source = self.sources[_storage(y)] = _Source(call, place, y, y._version)
                if autocast is not None and y.grad_fn is not None:
                    self.cast_sources[y.grad_fn, y.output_nr] = source
        return results

    def pack(self, x: Tensor) -> _Saved:
        """What autograd is to hold in place of `x`."""
        call = self.running
        if call is None:
            return self._save(x)
        call.num_saved += 1
        if x.numel() <= self.small or _storage(x) in self.inputs:
            return self._save(x)
        return _OnTheWay(call, call.num_saved - 1)

    def _save(self, x: Tensor) -> _Saved:
        source = self.sources.get(_storage(x))
        if source is not None and source.tensor.dtype == x.dtype and source.version == x._version:
            return _Result(source, x)
        if self.cast_sources and (source := self._cast_source(x)) is not None:
            return _Result(source, x)
        return _Kept(x)

    def _cast_source(self, x: Tensor) -> _Source | None:
        """The result that x is, or is a view of, after autocast has cast it for a matrix product."""
        cast = x if x._base is None else x._base
        if cast.grad_fn is None or cast.grad_fn.name() != "ToCopyBackward0" or cast._version:
            return None
        source = self.cast_sources.get(cast.grad_fn.next_functions[0])
        if source is None or source.tensor._version != source.version:
            return None
        alike = (source.tensor.device, source.tensor.stride()) == (cast.device, cast.stride())
        return source if alike else None

    def forget(self) -> None:
        """Let go of the results: notes need them no more, since no other tensor is to be compared with them."""
        self.sources.clear()
        self.cast_sources.clear()


_ACTIVE: ContextVar[_Recording | None] = ContextVar("recording", default=None)


def _storage(x: Tensor) -> int:
    """A number that tells storages apart while they live, those of size 0 included."""
    return x.untyped_storage()._cdata


def _autocast_dtype(device: str) -> torch.dtype | None:
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None


def _as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _never(saved: object) -> NoReturn:
    raise AssertionError("the graph of a function that runs again is not used")
