"""Messages and progress bars on standard error; bars appear on a terminal only."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich import progress
from rich.console import Console

T = TypeVar("T")

# One console on standard error, so that results on standard output can be piped.
console = Console(stderr=True)


def say(line: str) -> None:
    """Print one line on standard error, without markup or line breaks; of the processes of a run the first does."""
    if os.environ.get("RANK", "0") == "0":
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def track(items: Iterable[T], description: str) -> Iterable[T]:
    """The items, with a bar on a terminal that disappears at the end."""
    return progress.track(items, description, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def no_transformers_bars() -> Iterator[None]:
    """A context without the progress bars that transformers shows for every file that it loads or saves."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
