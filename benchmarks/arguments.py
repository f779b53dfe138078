"""What the benchmark commands share: lists of names as arguments."""

from __future__ import annotations

from deltazoo.names import unknown

__all__ = ["choices"]


def choices(text: str, allowed: tuple[str, ...], what: str) -> list[str]:
    """The names in a comma-separated list; ValueError for one that is not allowed, and for an empty list."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise ValueError(unknown(what, name, allowed))
    if not names:
        raise ValueError(f"no {what} given, expected a comma-separated list out of {', '.join(allowed)}")
    return names
