"""Blocks captured as two graphs behind one function of autograd.

It does the work of `torch.cuda.make_graphed_callables`, and allows what a training loop that knows nothing of graphs
does besides. Activations, hidden states and gradients lie where the next replay writes. So every tensor that leaves is
a copy, and three passes run eagerly: a second forward pass before the backward pass of the first, a second backward
pass, and a backward pass that will be differentiated.

The graphs are captured on aliases of the parameters: other parameters in the same memory, put in the modules' places
during the capture. So hooks of the parameters do not run then, and nodes that DDP keeps for them stay on their streams.
Parameters that FSDP gathers in every step are copied before a replay: their aliases have memory of their own.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deltazoo.generation.capture import beside_current, capture_graph, free_bytes
from deltazoo.layers.recompute_levels import WHOLE_BLOCKS
from deltazoo.models.captured_training.call import NotCapturedError, StackCall, autocast_of
from deltazoo.models.captured_training.conditions import BlocksState, checkpointing_of, modules_of, why_not_blocks

_SPARE = 2.2
"""Free memory that a capture needs, in multiples of what its graphs keep: an eager step must still fit beside them."""


class _ForwardPass:
    """A replayed forward pass; it lives as long as its results may be differentiated."""

    done = False  # whether the backward pass has used its activations


class GraphMemory:
    """The memory and the stream that all graphs of a model share, and the forward pass whose activations lie there."""

    def __init__(self, device: torch.device) -> None:
        self.device, on_gpu = device, device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self._last_stream: torch.cuda.Stream | None = None
        self._last_pass: Callable[[], _ForwardPass | None] = lambda: None
        self.copies = weakref.WeakValueDictionary[int, Tensor]()  # of gathered parameters, by their ids

    @property
    def pending(self) -> bool:
        """Whether it holds the activations of a forward pass whose backward pass may still come."""
        last = self._last_pass()
        return last is not None and not last.done

    def take(self) -> _ForwardPass:
        """A new forward pass, which overwrites the activations of the last one."""
        new = _ForwardPass()
        self._last_pass = weakref.ref(new)
        return new

    def holds(self, forward_pass: _ForwardPass) -> bool:
        """Whether the activations are those of this forward pass, untouched."""
        return not forward_pass.done and self._last_pass() is forward_pass

    def on_current_stream(self) -> None:
        """Let the current stream wait for the stream of the last replay, if that is another one."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            if self._last_stream is not None and self._last_stream != current:
                current.wait_stream(self._last_stream)
            self._last_stream = current


class CapturedStack:
    """A stack of blocks over inputs of one form, captured.

    Args:
        call: a call whose tensors serve as an example, and whose form every later call must have.
        x: hidden states `[B, T, D]` that enter the first block.
        memory: the memory that its graphs share with others of the model.

    Attributes:
        state: the state of the blocks that the graphs are good for.
        stale: number of calls, one after another, that met another state.
        nbytes: bytes that the graphs keep between forward and backward pass, gradients included.

    Raises:
        NotCapturedError: the blocks cannot be captured as they are.
        RuntimeError: the capture failed. Random numbers, buffers, modules and the current stream are as before.
    """

    def __init__(self, call: StackCall, x: Tensor, config: Any, memory: GraphMemory) -> None:
        if reason := why_not_blocks(call.blocks, x.device):
            raise NotCapturedError(reason)
        self.call, self.memory, self.state = call.without_tensors(), memory, BlocksState(call.blocks, config)
        self.generator = torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator
        self.autocast = autocast_of(x.device.type)
        self.x = x.detach().clone().requires_grad_(x.requires_grad)
        self.tensors = [tensor.clone() for tensor in call.tensors]
        self.trained: list[Tensor] = [p for p in self.state.parameters if p.requires_grad]
        self.draws, self.nbytes, self.stale = False, 0, 0
        self._live: Tensor | None = None
        copies: dict[int, Tensor] = {}
        for p in self.state.gathered:
            copy = memory.copies.get(id(p))
            copies[id(p)] = p.detach().clone() if copy is None else copy
        memory.copies.update(copies)
        gathered = _by_dtype(sorted(self.state.gathered, key=_dtype_name))
        self._copied = [([copies[id(p)] for p in group], group) for group in gathered]
        self._aliases = {
            id(p): nn.Parameter(copies.get(id(p), p.detach()), p.requires_grad) for p in self.state.parameters
        }
        random_state = self.generator.get_state()
        try:
            with torch.cuda.device(x.device) if x.is_cuda else nullcontext(), _checkpoints_without_states(call.blocks):
                self._rehearse(random_state)
                torch.clear_autocast_cache()
                (self.hidden,), self._replay_forward = self._record(self._forward)
                torch.clear_autocast_cache()
                self.d_hidden = torch.zeros_like(self.hidden)
                gradients, self._replay_backward = self._record(self._backward)
                self.gradients = _by_dtype(gradients)
            self.nbytes += sum(copy.nbytes for copy in copies.values())
            if not self.state.same():
                raise NotCapturedError("a block changes its own attributes while it runs")
        finally:
            self._live = None
            self.generator.set_state(random_state)
            torch.clear_autocast_cache()
        if self.x.is_cuda:
            self._aliases.clear()  # aliases would keep the memory of weights that are moved

    def _forward(self) -> list[Tensor]:
        with torch.enable_grad(), self.state.with_parameters(self._aliases):
            self._live = self.call.plain_run(self.x, self.tensors)
        return [self._live]

    def _backward(self) -> list[Tensor]:
        return [d for d in self._gradients(self.d_hidden) if d is not None]

    def _gradients(self, d_hidden: Tensor) -> Sequence[Tensor | None]:
        with self.state.with_parameters(self._aliases):
            return self._differentiated(self._live, self.x, self._aliases, d_hidden)

    def _differentiated(
        self, hidden: Any, x: Tensor, parameters: Mapping[int, Tensor], d_hidden: Tensor, **options: bool
    ) -> Sequence[Tensor | None]:
        """Gradients of x, if it has one, and of the aliases of the trained parameters."""
        inputs = [*([x] if self.x.requires_grad else []), *[parameters[id(p)] for p in self.trained]]
        return torch.autograd.grad(hidden, inputs, d_hidden, allow_unused=True, **options)

    def _rehearse(self, random_state: Tensor) -> None:
        """Run the blocks once as the capture will, and raise if that run shows that they cannot be captured."""
        buffers = [x for _, _, x in self.state.places if not isinstance(x, nn.Parameter)]
        before = [(x, x._version, x.clone()) for x in buffers]
        waits: list[str] = []
        if self.x.is_cuda:
            torch.cuda.empty_cache()  # frees memory of the current stream, which another stream cannot use
        try:
            with beside_current(self.memory.stream), _watched(waits, self.x.is_cuda):
                allocated = _allocated(self.x.device)
                (hidden,) = self._forward()
                self.nbytes = _allocated(self.x.device) - allocated
                self.draws = not torch.equal(self.generator.get_state(), random_state)
                gradients = self._gradients(torch.zeros_like(hidden))
                self.nbytes += sum(d.nbytes for d in gradients if d is not None) if self.x.is_cuda else 0
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
        modules = modules_of(self.call.blocks)
        recomputed = (checkpointing_of(x)[0] is not None or vars(x).get("recompute") in WHOLE_BLOCKS for x in modules)
        if self.draws and any(recomputed):
            raise NotCapturedError("blocks that run again in the backward pass would draw other random numbers")
        if (needed := self.nbytes * _SPARE) > (free := free_bytes(self.x.device)):
            raise NotCapturedError(f"{needed / 2**30:.1f} GiB would be needed, and {free / 2**30:.1f} are free")
        # Autograd runs hooks for a gradient of None, too: DDP would take the parameter for ready.
        used = gradients[len(gradients) - len(self.trained) :]
        trained = [p for p, d in zip(self.trained, used, strict=True) if d is not None]
        self.trained = sorted(trained, key=_dtype_name)  # gradients of one dtype are copied together

    def _record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], object]]:
        """The results of a run, at addresses to which a replay writes, and the replay itself."""
        if self.memory.stream is None:
            outputs = [y.detach().clone() for y in run()]
            return outputs, partial(_run_again, run, outputs)
        results: list[Tensor] = []
        graph = capture_graph(lambda: results.extend(run()), self.memory.stream, pool=self.memory.pool)
        if run == self._backward:
            self._live = None
        return [_borrowed(y.detach()) for y in results], graph.replay

    def run(self, call: StackCall, x: Tensor) -> Tensor | None:
        """Hidden states `[B, T, D]` by a replay; None, without any effect, if the blocks are in another state."""
        random_state = self.generator.get_state() if self.draws else None
        # Function.apply's own call in C, without its checks for function transforms, of which there are none here.
        out = super(torch.autograd.Function, _Replay).apply(self, call, random_state, x, *self.trained)
        if self.state.same():  # the device computes meanwhile
            return out
        if random_state is not None:
            self.generator.set_state(random_state)
        return None

    def replay_forward(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """A copy of the hidden states, where autograd does not record."""
        self.memory.on_current_stream()
        torch._foreach_copy_([self.x, *self.tensors], [x, *tensors])
        for copies, gathered in self._copied:
            torch._foreach_copy_(copies, gathered)
        self._replay_forward()
        return self.hidden.clone()

    def replay_backward(self, d_hidden: Tensor) -> list[Tensor]:
        """Copies of the gradients: of x, if it has one, then of the trained parameters."""
        self.memory.on_current_stream()
        self.d_hidden.copy_(d_hidden)
        self._replay_backward()
        # The only function of torch that allocates and writes many tensors at once; a factor of 1 changes no bit.
        return [*chain.from_iterable([torch._foreach_mul(gradients, 1) for gradients in self.gradients])]

    def gradients_again(
        self, x: Tensor, tensors: Sequence[Tensor], d_hidden: Tensor, random_state: Tensor | None
    ) -> Sequence[Tensor | None]:
        """The gradients of `replay_backward`, from an eager run; differentiable where autograd records."""
        if not (self.state.in_place() and self.state.same()):
            raise RuntimeError("the model has changed since the forward pass that is differentiated once more")
        create_graph, now = torch.is_grad_enabled(), self.generator.get_state()
        try:
            if random_state is not None:
                self.generator.set_state(random_state)
            with torch.enable_grad(), torch.autocast(*self.autocast):
                x, parts = x.view_as(x), {id(p): p.view_as(p) for p in self.state.parameters}
                with self.state.with_parameters(parts):
                    hidden = self.call.plain_run(x, tensors)
                return self._differentiated(hidden, x, parts, d_hidden, create_graph=create_graph)
        finally:
            self.generator.set_state(now)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stack: CapturedStack, call: StackCall, random_state: Any, x: Tensor, *_: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.stack, ctx.random_state, ctx.forward_pass = stack, random_state, stack.memory.take()
        # Autograd then raises if one of these is changed in place before the backward pass.
        ctx.save_for_backward(x, *call.tensors, *stack.state.parameters)
        return stack.replay_forward(x, call.tensors)

    @staticmethod
    def backward(ctx: Any, d_hidden: Tensor | None) -> Any:
        stack = ctx.stack
        if d_hidden is None:
            return (None,) * (4 + len(stack.trained))
        x, *others = ctx.saved_tensors
        if torch.is_grad_enabled() or not stack.memory.holds(ctx.forward_pass):
            tensors = others[: len(stack.tensors)]
            gradients = stack.gradients_again(x, tensors, d_hidden, ctx.random_state)
        else:
            gradients = stack.replay_backward(d_hidden)
            ctx.forward_pass.done = True
        return (*(None,) * (4 - stack.x.requires_grad), *gradients)


def _run_again(run: Callable[[], list[Tensor]], outputs: list[Tensor]) -> None:
    """The stand-in for a replay where there are no graphs: it overwrites the outputs of the first run."""
    for place, y in zip(outputs, run(), strict=True):
        place.copy_(y.detach())


def _dtype_name(x: Tensor) -> str:
    return str(x.dtype)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in lists of one dtype, over which one launch computes; those of a dtype follow each other."""
    return [list(group) for _, group in groupby(tensors, attrgetter("dtype"))]


@contextmanager
def _checkpoints_without_states(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """A context whose gradient checkpointing saves no state of random generators, which a capture cannot read."""
    replaced = []
    for module in modules_of(blocks):
        options, _ = checkpointing_of(module)
        if options is not None:
            attributes: dict[str, Any] = vars(module)
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
    """A context that collects the calls which make the host wait for the device, in the threads of autograd, too."""
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
    waits += [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA" in str(w.message)]


def _borrowed(x: Tensor) -> Tensor:
    """A tensor over x's memory that does not keep it: later captures of the pool may use it, too."""
    storage = x.untyped_storage()
    there = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), x.device, storage.nbytes())
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return empty.set_(there, x.storage_offset(), x.shape, x.stride())


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
