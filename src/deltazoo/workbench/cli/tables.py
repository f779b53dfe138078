"""Tables for a person."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from deltazoo.workbench.evaluate.comparison import Baseline

if TYPE_CHECKING:  # it brings torch, which a table of facts does not need
    from deltazoo.workbench.evaluate.score import Score


def comparison_table(
    name: str, score: "Score", others: Sequence[Baseline], has_seen: str = "the training text"
) -> Table:
    """The model and the baselines, best first."""
    rows = sorted([Baseline(name, score.bits_per_byte, has_seen), *others], key=lambda row: row.bits_per_byte)
    table = Table(title=f"documents scored: {score.documents}, {score.bytes:,} bytes")
    table.add_column("predictor")
    table.add_column("bits per byte", justify="right")
    table.add_column("has seen before")
    for row in rows:
        style = "bold green" if row.name == name else None
        table.add_row(row.name, f"{row.bits_per_byte:.3f}", row.has_seen, style=style)
    return table


def facts_table(facts: dict[str, str]) -> Table:
    """Names and values in two columns."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    return table
