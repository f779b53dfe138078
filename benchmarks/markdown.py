"""Parts of Markdown pages that are made from results."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["END_OF_PART", "filled", "picture", "table", "with_part"]

END_OF_PART = "<!-- end of what was measured -->"
_LINE = 120


def filled(text: str, bullet: str = "") -> str:
    """A paragraph in lines of at most 120 characters, after a bullet if given."""
    return textwrap.fill(
        text,
        _LINE,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int | None = None) -> str:
    """A table; columns after the first `text_columns` are aligned to the right (none if not given)."""
    left = len(header) if text_columns is None else text_columns
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows]) + "\n"


def picture(path: Path, page: Path, caption: str) -> str:
    """The picture at `path`, linked relative to the page."""
    return f"![{caption}]({path.relative_to(page.parent).as_posix()})\n"


def with_part(page: str, begin: str, part: str, end: str = END_OF_PART) -> str:
    """The text of a page with `part` between the comments `begin` and `end`, in place of what stands there.

    Raises:
        ValueError: the page does not have `begin` once, with `end` behind it.
    """
    if page.count(begin) != 1 or end not in page.partition(begin)[2]:
        raise ValueError(f"a page has a part between {begin} and {end} once, and this one does not")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{part}\n{end}{rest.partition(end)[2]}"
