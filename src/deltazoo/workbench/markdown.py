"""Parts of Markdown pages that are made from results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["picture", "table"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int | None = None) -> str:
    """A table; columns after the first `text_columns` are aligned to the right (none if not given)."""
    left = len(header) if text_columns is None else text_columns
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows]) + "\n"


def picture(path: Path, page: Path, caption: str) -> str:
    """The picture at `path`, linked relative to the page."""
    return f"![{caption}]({path.relative_to(page.parent).as_posix()})\n"
