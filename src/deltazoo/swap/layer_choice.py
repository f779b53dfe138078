"""Which layers to swap, in the ways a user may say it."""

import re
from collections.abc import Callable, Sequence

__all__ = ["LayerChoice", "choose_layers"]

LayerChoice = str | Sequence[int] | Callable[[int], bool]
"""`"all"`, a ratio `"3:1"`, numbers, or a predicate of the number."""


def choose_layers(choice: LayerChoice, num_layers: int) -> list[int]:
    """Numbers of the layers to swap, ascending.

    Args:
        choice: `"all"`; a ratio of delta-rule to softmax layers such as `"3:1"`, repeated from the first layer on
            (three delta-rule layers, one softmax layer, ...); numbers from 0; or a function from number to bool.
        num_layers: of the model.

    Raises:
        ValueError: an unreadable choice, a number outside the model or twice, or no layer at all.
    """
    if isinstance(choice, str):
        chosen = _by_name(choice, num_layers)
    elif callable(choice):
        chosen = [index for index in range(num_layers) if choice(index)]
    else:
        chosen = _by_number(choice, num_layers)
    if not chosen:
        raise ValueError(f"layers={choice!r} chooses none of the {num_layers} layers")
    return chosen


def _by_name(choice: str, num_layers: int) -> list[int]:
    if choice == "all":
        return list(range(num_layers))
    ratio = re.fullmatch(r"(\d+):(\d+)", choice)
    if ratio is None or ratio[1] == ratio[2] == "0":
        raise ValueError(f'layers must be "all", a ratio such as "3:1", numbers or a function, got {choice!r}')
    delta, softmax = int(ratio[1]), int(ratio[2])
    return [index for index in range(num_layers) if index % (delta + softmax) < delta]


def _by_number(numbers: Sequence[int], num_layers: int) -> list[int]:
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < num_layers:
            raise ValueError(f"layers are numbered 0 to {num_layers - 1}, got {number!r}")
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"layers names a layer twice: {list(numbers)}")
    return sorted(numbers)
