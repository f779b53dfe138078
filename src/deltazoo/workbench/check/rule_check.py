"""Run the checks of a rule one after another, each with what it found."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from deltazoo.spec import get_variant
from deltazoo.workbench.check.layer_checks import (
    clipped_step_sizes,
    make,
    parameters_are_filled_and_act,
    same_decoded,
    same_gradients_as_finite_differences,
    same_in_chunks_as_by_definition,
    same_packed,
    same_padded,
    same_twice,
    sees_no_future,
    state_does_not_expand,
)
from deltazoo.workbench.check.model_checks import same_after_reload, same_generated, swaps

__all__ = ["CHECKS", "Finding", "check_rule"]

_REPEATABLE = "the same call twice = the same output"

CHECKS: dict[str, Callable[[str], str | None]] = {
    _REPEATABLE: same_twice,
    "every parameter is filled and acts": parameters_are_filled_and_act,
    "no token reads the future": sees_no_future,
    "the state does not expand": state_does_not_expand,
    "chunk form = definition": same_in_chunks_as_by_definition,
    "gradients = finite differences": same_gradients_as_finite_differences,
    "decoding = training": same_decoded,
    "padded = alone": same_padded,
    "packed = alone": same_packed,
    "generation with a cache = without": same_generated,
    "reloaded = saved": same_after_reload,
    "swapped into a Llama": swaps,
}
"""The checks, in order: title -> function from a variant's name to what is wrong with it, None if nothing."""

_REMARKS = {"the state does not expand": clipped_step_sizes}


class Finding(NamedTuple):
    """The result of one check."""

    title: str
    problem: str | None
    """What is wrong, in a sentence or two; None: the rule passes."""
    remark: str | None = None
    """What is worth knowing about a rule that passes."""


def check_rule(variant: str) -> Iterator[Finding]:
    """Check a registered variant; findings come as they are made.

    A rule whose layers cannot be made gets no check; one whose results differ from call to call gets no further one.

    Args:
        variant: its name.

    Raises:
        ValueError: no such variant.
    """
    get_variant(variant)
    try:
        make(variant)
    except Exception as error:  # a rule under test may raise anything
        yield Finding("a layer can be made", _raised(error))
        return
    for title, check in CHECKS.items():
        torch.manual_seed(0)
        remark, raised = None, False
        try:
            problem = check(variant)
            if problem is None and title in _REMARKS:
                remark = _REMARKS[title](variant)
        except Exception as error:
            problem, raised = _raised(error), True
        yield Finding(title, problem, remark)
        if title == _REPEATABLE and problem is not None and not raised:
            return


def _raised(error: Exception) -> str:
    return f"raised {type(error).__name__}: {error}"
