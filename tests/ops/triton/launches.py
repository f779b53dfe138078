"""Launches of the operator's kernels, watched or replaced wherever they are made, and routes that a test forces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deltazoo.ops.triton import backward, delta_rule, launch, plan, problem  # noqa: F401, imports every launcher

HOPPER = plan.Card(gluon=True)
"""An H100, for calls on tensors without data."""


@contextmanager
def launched_by(function: Callable[..., None]) -> Iterator[None]:
    """In the meantime launches call `function(kernel, constants, *tensors)`."""
    original = launch.launch
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("deltazoo.ops.") and getattr(module, "launch", None) is original:
                patch.setattr(module, "launch", function)
        yield


@contextmanager
def routed(card: plan.Card | None = None, **fields: str) -> Iterator[None]:
    """Plans made in the meantime are for this card, and their routes have these fields."""
    route_of = plan.route_of
    with pytest.MonkeyPatch.context() as patch:
        if card is not None:
            patch.setattr(problem, "card_of", lambda _: card)
        if fields:
            patch.setattr(plan, "route_of", lambda sizes: route_of(sizes)._replace(**fields))
        plan.plan_for.cache_clear()
        yield
    plan.plan_for.cache_clear()


def arguments_of(kernel: Any, constants: launch.Constants, tensors: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments of a launch by name, options among them."""
    arguments = dict(zip(kernel.arg_names, tensors, strict=False))
    assert not arguments.keys() & constants.named.keys()
    return arguments | constants.named


def is_gluon(kernel: Any) -> bool:
    """Whether a kernel is one in Gluon."""
    return getattr(kernel, "is_gluon", lambda: False)()
