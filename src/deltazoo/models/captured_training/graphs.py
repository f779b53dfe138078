"""Blocks captured as two graphs behind one function of autograd.

`torch.cuda.make_graphed_callables` with what a training loop that knows nothing of graphs needs besides. Activations,
hidden states and gradients lie where the next replay writes. So whatever leaves is a copy, and a second forward pass
before the backward pass of the first runs eagerly, as do a second backward pass and one that will be differentiated.

The graphs are captured on aliases of the parameters: parameters of the same memory, in the modules' places meanwhile.
So hooks of the parameters do not run then, and nodes that DDP keeps for them stay on their streams.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deltazoo.generation.capture import beside_current, capture_graph, free_bytes
from deltazoo.models.captured_training.call import StackCall
from deltazoo.models.captured_training.conditions import Settings, Weights, checkpointing_of, why_not_blocks

__all__ = ["CapturedStack", "GraphMemory", "NotCapturedError", "Token"]

_SPARE = 2.2
"""Free memory that a capture needs, in sizes of what its graphs keep: an eager step of other rows must fit beside."""


class NotCapturedError(RuntimeError):
    """Blocks that cannot be captured, and why."""


class Token:
    """A forward pass; it lives as long as what was computed from it may be differentiated."""

    def __init__(self) -> None:
        self.done = False


class GraphMemory:
    """The memory that all graphs of a model share, one stream for their capture, and whose activations it holds."""

    def __init__(self, device: torch.device) -> None:
        self._token: Callable[[], Token | None] = lambda: None
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.pool: Any = None
        self._last: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @property
    def pending(self) -> bool:
        """Whether it holds the activations of a forward pass whose backward pass may still come."""
        token = self._token()
        return token is not None and not token.done

    def take(self) -> Token:
        """The token of a new forward pass, which overwrites the activations of the last one."""
        token = Token()
        self._token = weakref.ref(token)
        return token

    def holds(self, token: Token) -> bool:
        """Whether the activations are those of this forward pass, untouched."""
        return not token.done and self._token() is token

    def on_current_stream(self) -> None:
        """Let the current stream wait for the one of the last replay, if it is another one."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            if self._last is not None and self._last != current:
                current.wait_stream(self._last)
            self._last = current


class CapturedStack:
    """A stack of blocks over inputs of one form, captured.

    Args:
        call: whose tensors are taken as an example, and whose form every later call must have.
        x: hidden states `[B, T, D]` that enter the first block.
        config: of the model.
        memory: that its graphs share with others of the model.

    Attributes:
        nbytes: what the graphs keep between forward and backward pass, gradients included.

    Raises:
        NotCapturedError: the blocks cannot be captured as they are.
        RuntimeError: the capture failed. Random numbers, buffers, modules and the current stream are as before.
    """

    def __init__(self, call: StackCall, x: Tensor, config: Any, memory: GraphMemory) -> None:
        if reason := why_not_blocks(call.blocks, x.device):
            raise NotCapturedError(reason)
        self.call, self.memory, self.stale = call.without_tensors(), memory, 0
        self.settings, self.weights = Settings(call.blocks, config), Weights(call.blocks)
        self.generator = torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator
        self.autocast = _autocast_of(x.device.type)
        self.x = x.detach().clone().requires_grad_(x.requires_grad)
        self.tensors = [tensor.clone() for tensor in call.tensors]
        self.trained: list[Tensor] = [p for p in self.weights.parameters if p.requires_grad]
        self.draws, self.nbytes = False, 0
        self._live: Tensor | None = None
        state = self.generator.get_state()
        try:
            with torch.cuda.device(x.device) if x.is_cuda else nullcontext(), _checkpoints_without_states(call.blocks):
                self._capture(state)
            if not self.is_up_to_date():
                raise NotCapturedError("a block changes its own attributes while it runs")
        finally:
            self._live = None
            self.generator.set_state(state)
            torch.clear_autocast_cache()

    def _capture(self, state: Tensor) -> None:
        self._rehearse(state)
        torch.clear_autocast_cache()
        (self.hidden,), self._replay_forward = self._record(self._forward)
        torch.clear_autocast_cache()
        self.d_hidden = torch.zeros_like(self.hidden)
        self.gradients, self._replay_backward = self._record(self._backward)
        self._copies = _Copies(self.gradients)
        if self.x.is_cuda:
            self._aliases.clear()  # they would keep the memory of weights that are moved

    def _forward(self) -> list[Tensor]:
        with torch.enable_grad(), self._aliased():
            self._live = self.call.plain_run(self.x, self.tensors)
        return [self._live]

    def _backward(self) -> list[Tensor]:
        return [d for d in self._gradients(self.d_hidden) if d is not None]

    def _gradients(self, d_hidden: Tensor) -> Sequence[Tensor | None]:
        inputs = [*([self.x] if self.x.requires_grad else []), *[self._aliases[id(p)] for p in self.trained]]
        with self._aliased():
            return torch.autograd.grad(self._live, inputs, d_hidden, allow_unused=True)  # type: ignore[arg-type]

    @contextmanager
    def _aliased(self) -> Iterator[None]:
        if not hasattr(self, "_aliases"):
            made = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in self.weights.parameters}
            self._aliases = made
        with _in_place_of_parameters(self.weights, self._aliases):
            yield

    def _rehearse(self, state: Tensor) -> None:
        """Run once as the capture will, and raise if that shows that it cannot be captured."""
        buffers = [x for _, _, x in self.weights.places if not isinstance(x, nn.Parameter)]
        before = [(x, x._version, x.clone()) for x in buffers]
        waits: list[str] = []
        if self.x.is_cuda:
            torch.cuda.empty_cache()  # blocks of the current stream, which are no use on another one
        try:
            with beside_current(self.memory.stream), _watched(waits, self.x.is_cuda):
                allocated = _allocated(self.x.device)
                (hidden,) = self._forward()
                kept = _allocated(self.x.device) - allocated
                self.draws = not torch.equal(self.generator.get_state(), state)
                gradients = self._gradients(torch.zeros_like(hidden))
                kept += sum(d.nbytes for d in gradients if d is not None) if self.x.is_cuda else 0
                del hidden
                self._live = None
        finally:
            written = [(x, value) for x, version, value in before if x._version != version]
            for x, value in written:
                x.copy_(value)
        if written:
            raise NotCapturedError("a block writes to its buffers")
        if waits:
            raise NotCapturedError(f"a block waits for the device: {waits[0]}")
        if self.draws and self._runs_twice():
            raise NotCapturedError("blocks that run again in the backward pass would draw other random numbers")
        self.nbytes = kept
        if kept * _SPARE > (free := free_bytes(self.x.device)):
            raise NotCapturedError(f"{kept * _SPARE / 2**30:.1f} GiB would be needed, and {free / 2**30:.1f} are free")
        used = gradients[1:] if self.x.requires_grad else gradients
        # Autograd runs hooks for a gradient of None, too: DDP would take the parameter for ready.
        self.trained = [p for p, d in zip(self.trained, used, strict=True) if d is not None]

    def _runs_twice(self) -> bool:
        modules = [module for block in self.call.blocks for module in block.modules()]
        return any(checkpointing_of(m)[0] is not None or vars(m).get("recompute") == "block" for m in modules)

    def _record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], object]]:
        """What a run gives, at addresses that a replay writes to; and the replay."""
        if self.memory.stream is None:
            outputs = [y.detach().clone() for y in run()]
            return outputs, partial(_run_again, run, outputs)
        results: list[Tensor] = []
        graph = capture_graph(lambda: results.extend(run()), self.memory.stream, pool=self.memory.pool)
        if run == self._backward:
            self._live = None
        return [_borrowed(y.detach()) for y in results], graph.replay

    def is_up_to_date(self) -> bool:
        """Whether modules, settings and weights are those of the capture; whether in place, `weights` says."""
        return self.weights.same() and self.settings.same()

    def run(self, call: StackCall, x: Tensor) -> Tensor | None:
        """Hidden states `[B, T, D]` by a replay; None if the settings have changed, and nothing else then."""
        state = self.generator.get_state() if self.draws else None
        # As `_Replay.apply`, without its looks at every argument: there are no function transforms here.
        out = super(torch.autograd.Function, _Replay).apply(self, call, state, x, *self.trained)
        if not self.is_up_to_date():  # the device computes meanwhile
            if state is not None:
                self.generator.set_state(state)
            return None
        return out

    def replay_forward(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """A copy of the hidden states."""
        self.memory.on_current_stream()
        with torch.no_grad():
            self.x.copy_(x)
            for place, value in zip(self.tensors, tensors, strict=True):
                place.copy_(value)
        self._replay_forward()
        return self.hidden.clone()

    def replay_backward(self, d_hidden: Tensor) -> list[Tensor | None]:
        """Copies of the gradients: of x, or None, then of the trained parameters."""
        self.memory.on_current_stream()
        self.d_hidden.copy_(d_hidden)
        self._replay_backward()
        copies: list[Tensor | None] = [*self._copies.make()]
        return copies if self.x.requires_grad else [None, *copies]

    def gradients_again(
        self, x: Tensor, tensors: Sequence[Tensor], d_hidden: Tensor, state: Tensor | None
    ) -> list[Tensor | None]:
        """Gradients as of `replay_backward`, from an eager run; differentiable where autograd records."""
        if not (self.weights.in_place() and self.is_up_to_date()):
            raise RuntimeError("the model has changed since the forward pass that is differentiated once more")
        create_graph = torch.is_grad_enabled()
        now = self.generator.get_state()
        with torch.enable_grad():
            parts = {id(p): p.view_as(p) for p in self.weights.parameters}
            x = x.view_as(x)
            device, dtype, enabled, cached = self.autocast
            try:
                if state is not None:
                    self.generator.set_state(state)
                with (
                    torch.autocast(device, dtype, enabled, cached),
                    _in_place_of_parameters(self.weights, parts),
                ):
                    hidden = self.call.plain_run(x, tensors)
                    inputs = [*([x] if self.x.requires_grad else []), *[parts[id(p)] for p in self.trained]]
                    found = torch.autograd.grad(hidden, inputs, d_hidden, create_graph=create_graph, allow_unused=True)
            finally:
                self.generator.set_state(now)
        return list(found) if self.x.requires_grad else [None, *found]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: CapturedStack, call: StackCall, state: Tensor | None, x: Tensor, *_: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.graph, ctx.state, ctx.token = graph, state, graph.memory.take()
        ctx.versions = graph.weights.versions()
        ctx.save_for_backward(x, *call.tensors)
        return graph.replay_forward(x, call.tensors)

    @staticmethod
    def backward(ctx: Any, d_hidden: Tensor | None) -> Any:
        graph = ctx.graph
        if d_hidden is None:
            return (None, None, None, None, *[None] * len(graph.trained))
        if graph.weights.versions() != ctx.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                "parameter of the blocks, between a captured forward pass and its backward pass"
            )
        if torch.is_grad_enabled() or not graph.memory.holds(ctx.token):
            x, *tensors = ctx.saved_tensors
            gradients = graph.gradients_again(x, tensors, d_hidden, ctx.state)
        else:
            gradients = graph.replay_backward(d_hidden)
            ctx.token.done = True
        return None, None, None, *gradients


def _run_again(run: Callable[[], list[Tensor]], outputs: list[Tensor]) -> None:
    """The stand-in for a replay where there are no graphs: it overwrites the outputs of the first run."""
    for place, y in zip(outputs, run(), strict=True):
        place.copy_(y.detach())


@contextmanager
def _in_place_of_parameters(weights: Weights, others: dict[int, Any]) -> Iterator[None]:
    """Put other tensors in the places of parameters within this context, by the parameters' ids."""
    places = [(by, name, by[name], others[id(x)]) for by, name, x in weights.places if id(x) in others]
    for by, name, _, other in places:
        by[name] = other
    try:
        yield
    finally:
        for by, name, before, _ in places:
            by[name] = before


@contextmanager
def _checkpoints_without_states(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Gradient checkpointing that does not save the state of random generators, which a capture cannot read."""
    replaced = []
    for module in {id(m): m for block in blocks for m in block.modules()}.values():
        options, _ = checkpointing_of(module)
        if options is not None:
            attributes = vars(module)
            replaced.append((attributes, attributes["_gradient_checkpointing_func"]))
            options = {**options, "preserve_rng_state": False}
            attributes["_gradient_checkpointing_func"] = partial(checkpoint, **options)
    try:
        yield
    finally:
        for attributes, function in replaced:
            attributes["_gradient_checkpointing_func"] = function


@contextmanager
def _watched(waits: list[str], on_gpu: bool) -> Iterator[None]:
    """Collect what makes the host wait for the device, in the threads of autograd, too."""
    if not on_gpu:
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    messages = [str(warning.message) for warning in caught]
    waits += [f"{w.filename}:{w.lineno}" for w, m in zip(caught, messages, strict=True) if "synchronizing CUDA" in m]


def _borrowed(x: Tensor) -> Tensor:
    """The same numbers without a hold on their memory, which later captures of the pool may use, too."""
    storage = x.untyped_storage()
    there = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), x.device, storage.nbytes())
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return empty.set_(there, x.storage_offset(), x.shape, x.stride())


class _Copies:
    """Copies of tensors that always lie at the same addresses, a launch or a few for each dtype."""

    def __init__(self, originals: Sequence[Tensor]) -> None:
        self._count = len(originals)
        self._groups: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
        for number, x in enumerate(originals):
            numbers, tensors = self._groups.setdefault(x.dtype, ([], []))
            numbers.append(number)
            tensors.append(x)

    def make(self) -> list[Tensor]:
        """New copies, each with memory of its own."""
        copies: list[Any] = [None] * self._count
        for numbers, tensors in self._groups.values():
            # The one function of torch that allocates and writes many tensors at once; times one changes no bit.
            for number, copied in zip(numbers, torch._foreach_mul(tensors, 1), strict=True):
                copies[number] = copied
        return copies


def _autocast_of(device: str) -> tuple[str, torch.dtype, bool, bool]:
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return device, dtype, enabled, torch.is_autocast_cache_enabled()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
