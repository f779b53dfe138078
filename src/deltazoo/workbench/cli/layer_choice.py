"""What ``deltazoo swap --layers`` may say."""

import re


def parse_layers(choice: str) -> str | list[int]:
    """``--layers`` as ``swap_attention`` takes it; ``best:K`` stays as it is.

    Raises:
        ValueError: none of the forms.
    """
    if choice == "all" or re.fullmatch(r"\d+:\d+|best:\d+", choice):
        return choice
    if re.fullmatch(r"\d+(,\d+)*", choice):
        return [int(number) for number in choice.split(",")]
    raise ValueError(f"--layers takes all, numbers such as 0,2,5, a ratio such as 3:1, or best:K, got {choice!r}")


def best_count(layers: str | list[int]) -> int | None:
    """K of ``best:K``; None for every other choice."""
    return int(layers.removeprefix("best:")) if isinstance(layers, str) and layers.startswith("best:") else None
