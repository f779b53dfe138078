"""Messages for a name that is not among the known ones, with the nearest of them; reasons; names of swapped models."""

import os
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])

SWAPPED_PREFIX = "deltazoo_"
"""The beginning of the model type of a model with swapped attention; the original model type follows."""


def unknown(kind: str, value: object, known: Iterable[str], *, within: str = "") -> str:
    """The sentence "unknown KIND 'x'; did you mean 'a'? known: a, b, c".

    Args:
        kind: what the name stands for, for example "rule".
        value: the name as given.
        known: the names there are, in the order in which the sentence lists them.
        within: what the sentence shows before the name inside the quotes, for example the section of a configuration
            file ("training."); it plays no part in the search for the nearest name.
    """
    known = list(known)
    hint = did_you_mean(value, known)
    quoted = repr(f"{within}{value}" if within else value)
    return f"unknown {kind} {quoted}{hint}{'' if hint else ';'} known: {', '.join(known)}"


def first_reason(*reasons: tuple[object, str]) -> str | None:
    """The first of these sentences whose condition, the value before it, is true; None if none is."""
    return next((sentence for holds, sentence in reasons if holds), None)


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


def did_you_mean(value: object, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The clause "; did you mean 'a'?", or nothing if no known name is near."""
    near = nearest(value, known, cutoff=cutoff)
    return f"; did you mean {near!r}?" if near else ""


def nearest(value: object, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most similar to `value`; None if none has a similarity of `cutoff` (0 to 1, as in difflib).

    Case, spaces, "-" and "_" do not count. Among similar ones, a name that begins with `value` comes first.
    """
    plain, names = _plain(str(value)), {_plain(name): name for name in known}
    near = get_close_matches(plain, names, n=3, cutoff=cutoff)
    found = next((name for name in near if name.startswith(plain)), next(iter(near), None))
    return None if found is None else names[found]


def _plain(name: str) -> str:
    """The name in lower case, without spaces, "-" and "_"."""
    return name.lower().translate(dict.fromkeys(map(ord, " -_")))


def one_slip_away(value: str, known: Iterable[str]) -> str | None:
    """The known name that differs by one slip: a character more, less or other, or two neighbours swapped."""
    for name in get_close_matches(value, list(known), n=3, cutoff=0.8):
        start = len(os.path.commonprefix([value, name]))
        given, meant = value[start:], name[start:]
        end = len(os.path.commonprefix([given[::-1], meant[::-1]]))
        given, meant = given[: len(given) - end], meant[: len(meant) - end]
        if max(len(given), len(meant)) == 1 or (len(given) == 2 and given == meant[::-1]):
            return name
    return None
