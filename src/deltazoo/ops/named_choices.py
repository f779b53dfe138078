"""Options of a spec that are the name of a function or a function."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from deltazoo.names import unknown

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
        raise ValueError(f"{unknown(kind, choice, known)}, or a function")
    return known[choice]
