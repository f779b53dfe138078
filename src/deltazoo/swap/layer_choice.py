"""The choice of layers to swap, in the forms that users may write it."""

import re
from collections.abc import Callable, Iterable, Sequence

__all__ = ["LayerChoice", "choose_layers", "parse_layers"]

LayerChoice = str | Sequence[int] | Callable[[int], bool]
"""`"all"`, a ratio `"3:1"`, numbers (a sequence, or written `"0,2,5"`), or a predicate of the number."""


def choose_layers(choice: LayerChoice, num_layers: int) -> list[int]:
    """Numbers of the layers to swap, ascending.

    Args:
        choice: `"all"`; a ratio of delta-rule to softmax layers such as `"3:1"`, repeated from the first layer on
            (three delta-rule layers, one softmax layer, ...); numbers from 0, as a sequence or written `"0,2,5"`; or
            a function from number to bool.
        num_layers: of the model.

    Raises:
        ValueError: an unreadable choice, a number outside the model or twice, or no layer at all.
    """
    if not (callable(choice) or isinstance(choice, Iterable)):
        raise ValueError(_forms(choice))
    read = parse_layers(choice) if isinstance(choice, str) else choice
    chosen = [index for index in range(num_layers) if read(index)] if callable(read) else _by_number(read, num_layers)
    if not chosen:
        raise ValueError(f"layers={choice!r} chooses none of the {num_layers} layers")
    return chosen


def parse_layers(choice: str) -> Sequence[int] | Callable[[int], bool]:
    """The numbers or the predicate that a written choice stands for: `"all"`, `"3:1"` or `"0,2,5"`.

    Raises:
        ValueError: none of these forms.
    """
    if choice == "all":
        return lambda index: True
    if re.fullmatch(r"\d+(,\d+)*", choice):
        return [int(number) for number in choice.split(",")]
    ratio = re.fullmatch(r"(\d+):(\d+)", choice)
    if ratio is None or ratio[1] == ratio[2] == "0":
        raise ValueError(_forms(choice))
    delta, softmax = int(ratio[1]), int(ratio[2])
    return lambda index: index % (delta + softmax) < delta


def _forms(choice: object) -> str:
    return (
        'layers must be "all", a ratio such as "3:1", numbers such as "0,2,5", or in Python a sequence of numbers '
        f"or a function, got {choice!r}"
    )


def _by_number(numbers: Sequence[int], num_layers: int) -> list[int]:
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < num_layers:
            raise ValueError(f"layers are numbered 0 to {num_layers - 1}, got {number!r}")
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"layers names a layer twice: {list(numbers)}")
    return sorted(numbers)
