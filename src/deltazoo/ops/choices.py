"""A choice that a spec makes by name or by bringing a function of its own."""

import difflib
from collections.abc import Callable, Mapping
from typing import TypeVar

__all__ = ["function_of"]

Function = TypeVar("Function", bound=Callable[..., object])


def function_of(kind: str, choice: str | Function, known: Mapping[str, Function]) -> Function:
    """The function of that name, or `choice` itself if it is a function.

    Raises:
        ValueError: an unknown name; the message lists them and names the nearest.
    """
    if not isinstance(choice, str):
        return choice
    if choice not in known:
        close = difflib.get_close_matches(choice, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown {kind} {choice!r}; {hint}known: {', '.join(known)}, or a function")
    return known[choice]
