"""The checks of a rule, one after another, each with its finding."""

import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.checks import promises
from deltazoo.layers import LayerInput
from deltazoo.spec import get_rule, registering_module

_REPEATABLE = "the same call twice = the same output"
_BOUNDED = "the state does not expand"

CHECKS: dict[str, Callable[[str], str | None]] = {
    _REPEATABLE: promises.same_twice,
    "every parameter is filled and acts": promises.parameters_are_filled_and_act,
    "no token reads the future": promises.sees_no_future,
    _BOUNDED: promises.state_does_not_expand,
    "chunk form = definition": promises.same_in_chunks_as_by_definition,
    "gradients = finite differences": promises.same_gradients_as_finite_differences,
    "decoding = training": promises.same_decoded,
    "padded = alone": promises.same_padded,
    "packed = alone": promises.same_packed,
    "generation with a cache = without": promises.same_generated,
    "reloaded = saved": promises.same_after_reload,
    "swapped into a Llama": promises.swaps,
}
"""The checks in order, by title: functions from a rule's name to its fault, None if there is none."""


class Finding(NamedTuple):
    """The result of one check."""

    title: str
    problem: str | None
    """The fault, in a sentence or two; None: the rule passes."""
    remark: str | None = None
    """A remark about a rule that passes."""
    error: Exception | None = None
    """The exception that the check raised, unless an earlier check raised it in the same place."""


def check_rule(rule: str) -> Iterator[Finding]:
    """The findings about a registered rule, one by one.

    There are none after a failure to make the rule's layer, or after results that differ from call to call.

    Args:
        rule: name of the rule.

    Raises:
        ValueError: no such rule.
    """
    get_rule(rule)
    seen: set[Any] = set()
    try:
        promises.make(rule)
    except Exception as error:  # a rule under test may raise anything
        yield _raised("a layer can be made", rule, error, seen)
        return
    for title, check in CHECKS.items():
        torch.manual_seed(0)
        try:
            problem = check(rule)
            remark = promises.clipped_step_sizes(rule) if title == _BOUNDED and problem is None else None
        except Exception as error:
            yield _raised(title, rule, error, seen)
            continue
        yield Finding(title, problem, remark)
        if title == _REPEATABLE and problem is not None:
            return


def _raised(title: str, rule: str, error: Exception, seen: set[Any]) -> Finding:
    """The finding about an exception: its place in the rule's file and the shapes there; shorter if it is in `seen`."""
    module = registering_module(rule) or "deltazoo.rules"
    calls = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if f"{frame.f_globals.get('__name__')}.".startswith(f"{module}.")
    ]
    place = (type(error), calls[-1][1] if calls else str(error))
    if place in seen:
        return Finding(title, "raised the same error")
    seen.add(place)
    where = _place(*calls[-1]) if calls else f"In no line of {module}: what the rule returned was refused."
    return Finding(title, f"raised {type(error).__name__}: {error}\n{where}", error=error)


def _place(frame: FrameType, line: int) -> str:
    """File, line and function, with the shapes of the tensors among its arguments."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = {name: frame.f_locals.get(name) for name in names}
    given |= {f"{name}.hidden_states": x.hidden_states for name, x in given.items() if isinstance(x, LayerInput)}
    shapes = [f"{name}: {[*x.shape]} {x.dtype}" for name, x in given.items() if isinstance(x, Tensor)]
    return f"{code.co_filename}, line {line}, in {code.co_name}({', '.join(shapes)})"
