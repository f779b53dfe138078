"""Few combinations of many options."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations, always the same, among which any two values of different options meet."""
    every = [*product(*(range(len(values)) for values in options))]
    pairs = {chosen: {*combinations(enumerate(chosen), 2)} for chosen in every}
    left, found = set().union(*pairs.values()), []
    while left:
        best = max(every, key=lambda chosen: len(pairs[chosen] & left))
        left -= pairs[best]
        found.append(tuple(values[i] for values, i in zip(options, best, strict=True)))
    return found
