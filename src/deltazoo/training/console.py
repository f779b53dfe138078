"""Messages and progress bars on standard error; bars appear on a terminal only."""

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")

# One console on standard error, so that results on standard output can be piped.
console = Console(stderr=True)


def say(line: str) -> None:
    """Print one line on standard error as it is: no markup, no line breaks."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress_bar(*columns: str) -> Progress:
    """A bar with counts and times, followed by ``columns``: templates such as ``"{task.fields[loss]}"``."""
    return Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        *(TextColumn(column) for column in columns),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate over the items and show a bar, which disappears at the end."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress_bar() as progress:
        yield from progress.track(items, total=total, description=description)


@contextmanager
def no_transformers_bars() -> Iterator[None]:
    """Hide the progress bars of transformers, which shows one for every file that it loads or saves."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
