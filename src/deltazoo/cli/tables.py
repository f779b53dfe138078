"""Tables that the commands print."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from deltazoo.training.comparison import Baseline

if TYPE_CHECKING:  # these import torch, which a table of facts does not need
    from deltazoo.training.conversion import ConversionResult
    from deltazoo.training.conversion_config import ConversionConfig
    from deltazoo.training.layer_ranking import Ranking
    from deltazoo.training.score import Score


def comparison_table(name: str, score: "Score", others: Sequence[Baseline]) -> Table:
    """The model and the baselines, best first."""
    model = Baseline(name, score.bits_per_byte, "the training text")
    rows = sorted([model, *others], key=lambda row: row.bits_per_byte)
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


def ranking_table(ranking: "Ranking") -> Table:
    """The layers, the smallest rise in loss first."""
    table = Table(title=f"one layer swapped for {ranking.rule} after transfer, {ranking.tokens:,} tokens")
    for heading in ("layer", "loss, nats per token", "rise"):
        table.add_column(heading, justify="right")
    for score in ranking.ordered:
        table.add_row(str(score.layer), f"{score.loss:.4f}", f"{score.rise:+.4f}")
    table.add_row("none", f"{ranking.loss:.4f}", "", style="dim")
    return table


def stages_table(recipe: "ConversionConfig") -> Table:
    """The stages of a conversion before it is run."""
    table = Table(title=f"training that would follow, on {recipe.data.text}")
    for heading in ("stage", "trains", "steps", "tokens", "learning rate"):
        table.add_column(heading, justify="left" if heading in ("stage", "trains") else "right")
    for stage in recipe.stages:
        tokens = stage.steps * stage.rows_of_a_step * stage.row_length
        table.add_row(stage.section, stage.trains, f"{stage.steps:,}", f"{tokens:,}", f"{stage.learning_rate:g}")
    return table


def conversion_table(result: "ConversionResult") -> Table:
    """Held-out bits per byte after each stage."""
    names = {"original": "original", "transfer": "swapped, weights transferred"}
    gap = result.scores["transfer"] - result.scores["original"]
    table = Table(title="conversion")
    for heading in ("", "held-out bits per byte", "gap recovered", "tokens"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, bits in result.scores.items():
        stage: Any = result.stages.get(name)
        recovered = f"{(result.scores['transfer'] - bits) / gap:.1%}" if stage and gap > 0 else ""
        tokens = f"{stage.tokens:,}" if stage else ""
        table.add_row(names.get(name, f"after {name}"), f"{bits:.3f}", recovered, tokens)
    return table
