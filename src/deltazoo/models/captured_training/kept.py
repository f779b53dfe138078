"""The captured stacks of a model: when one is made, when one is replayed, and their lines in `deltazoo.report`.

The third call of a shape captures it. The calls before it run eagerly, and so do all calls that no graph fits; the
reasons are counted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.generation.capture import graphs_run_on
from deltazoo.models.captured_training.call import NotCapturedError, StackCall, surroundings
from deltazoo.models.captured_training.conditions import why_not_now
from deltazoo.models.captured_training.graphs import CapturedStack, GraphMemory

_Calls = Sequence[tuple[nn.Module, Mapping[str, Any]]]
_ATTRIBUTE = "_captured_training"
_EAGER_CALLS = 2
"""Calls of a form before the one that captures it."""
_MOST_GRAPHS = 8
_MOST_FORMS = 512
"""Number of forms whose calls are counted."""
_MOST_RECAPTURES = 3
"""Captures in place of stacks that were dropped because the model changed."""
_CALLS_UNTIL_NEXT_TRY = 100
"""Calls that run eagerly after blocks could not be captured, before the next try."""
_PATIENCE = 3
"""Calls with other settings than at its capture after which a stack is dropped: a hook may stay for one step only."""


def run_blocks(model: Any, calls: _Calls, x: Tensor, *, wanted: bool = True) -> Tensor:
    """Hidden states `[B, T, D]` after the last block; in training by a captured stack where one fits.

    Args:
        model: the model of the blocks; it keeps what is captured.
        x: `[B, T, D]`, the input of the first block.
        wanted: whether capture is allowed.
    """
    trains = model.training and torch.is_grad_enabled() and graphs_run_on(x.device)
    if wanted and trains and not torch.compiler.is_compiling():
        return _kept(model).run(model.config, calls, x)
    return _run(calls, x)


def note_eager(model: Any, reason: str) -> None:
    """Count a training step that runs eagerly, for `deltazoo.report`."""
    _kept(model).reasons[reason] += 1


def forget_captured(model: nn.Module) -> None:
    """Free all graphs of a model and forget its counts, so that a form must come three times again."""
    for module in model.modules():
        vars(module).pop(_ATTRIBUTE, None)


def _kept(model: nn.Module) -> "_KeptStacks":
    if _ATTRIBUTE not in vars(model):
        vars(model)[_ATTRIBUTE] = _KeptStacks()
    return vars(model)[_ATTRIBUTE]


def _run(calls: _Calls, x: Tensor) -> Tensor:
    for block, arguments in calls:
        x = block(x, **arguments)
    return x


class _KeptStacks:
    """Captured stacks by form, and counts of calls. A copy of the model starts without any."""

    def __init__(self) -> None:
        self.stacks: dict[Any, CapturedStack] = {}
        self.memory: GraphMemory | None = None
        self.seen: Counter[Any] = Counter()
        self.reasons: Counter[str] = Counter()
        self.replayed = self.recaptures = 0
        self.not_captured: dict[Any, str] = {}
        self.captures_no_more: str | None = None

    def __deepcopy__(self, memo: object) -> "_KeptStacks":
        return _KeptStacks()

    def __reduce__(self) -> Any:
        return _KeptStacks, ()

    def run(self, config: Any, calls: _Calls, x: Tensor) -> Tensor:
        """Hidden states after the last block, captured or eager."""
        out = self._replay(config, calls, x)
        if isinstance(out, Tensor):
            self.replayed += 1
            return out
        self.reasons[out] += 1
        try:
            return _run(calls, x)
        except torch.OutOfMemoryError:
            if not self.stacks:
                raise
        self._give_up("memory ran out in an eager step, and the graphs were given up")
        return _run(calls, x)

    def _give_up(self, reason: str) -> str:
        self.captures_no_more = reason
        self.stacks.clear()
        torch.cuda.empty_cache()
        return reason

    def _replay(self, config: Any, calls: _Calls, x: Tensor) -> Tensor | str:
        """The hidden states by a replay, or the reason why there is none."""
        if reason := why_not_now(x):
            return reason
        try:
            call = StackCall(calls)
            form = call.form, surroundings(x)
            stack = self.stacks.get(form) or self._capture(form, call, x, config)
        except NotCapturedError as error:
            return str(error)
        if isinstance(stack, str):
            return stack
        if stack.memory.pending:
            return "the backward pass of an earlier forward pass is still to come"
        if not stack.state.in_place():
            return self._drop(form, "parameters or buffers have been moved")
        out = None if stack.stale and not stack.state.same() else stack.run(call, x)
        if out is not None:
            stack.stale = 0
            return out
        stack.stale += 1
        reason = "modules, weights, hooks or settings of the blocks have changed"
        return self._drop(form, reason) if stack.stale > _PATIENCE else reason

    def _drop(self, form: Any, reason: str) -> str:
        del self.stacks[form]
        self.recaptures += 1
        if self.recaptures > _MOST_RECAPTURES:
            self.captures_no_more = f"the blocks have changed more than {_MOST_RECAPTURES} times"
        return reason

    def _capture(self, form: Any, call: StackCall, x: Tensor, config: Any) -> CapturedStack | str:
        """A captured stack for calls of this form, or the reason why there is none now."""
        if self.captures_no_more is not None:
            return self.captures_no_more
        if len(self.seen) == _MOST_FORMS:
            self.seen.clear()
            self.not_captured.clear()
        self.seen[form] += 1
        if self.seen[form] <= _EAGER_CALLS:
            first = f"a shape is captured when it comes for the {_EAGER_CALLS + 1}rd time"
            return self.not_captured.get(form, first)
        if len(self.stacks) == _MOST_GRAPHS:
            return f"{_MOST_GRAPHS} shapes are captured already: pad to fewer ones (pad_to_multiple_of)"
        if self.memory is None or self.memory.device != x.device:
            self.memory = GraphMemory(x.device)
        if self.memory.pending:
            return "the backward pass of an earlier forward pass is still to come"
        try:
            self.stacks[form] = CapturedStack(call, x, config, self.memory)
        except NotCapturedError as error:
            self.seen[form], self.not_captured[form] = -_CALLS_UNTIL_NEXT_TRY, str(error)
            return str(error)
        except Exception as error:  # blocks and drivers raise what they like: the step runs eagerly
            reason = f"the capture failed ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
            if isinstance(error, torch.OutOfMemoryError):
                return self._give_up(reason)
            self.captures_no_more = reason
            return reason
        self.not_captured.pop(form, None)
        return self.stacks[form]

    def describe(self) -> str:
        """Lines for `deltazoo.report`."""
        shapes = [f"{' x '.join(map(str, stack.x.shape[:2]))}" for stack in self.stacks.values()]
        eager = sum(self.reasons.values())
        lines = [f"training steps: {self.replayed:,} replayed from CUDA graphs, {eager:,} eager"]
        if shapes:
            most = max(stack.nbytes for stack in self.stacks.values()) / 2**30
            lines.append(f"  captured shapes: {', '.join(shapes)}; they share {most:.1f} GiB")
        lines += [f"  {count:,} eager: {reason}" for reason, count in self.reasons.most_common()]
        return "\n".join(lines)
