"""``deltazoo list``: the variants."""

import typer
from rich.console import Console
from rich.table import Table

from deltazoo.workbench.rule_files import LoadOption


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("list", epilog="Example: [bold]deltazoo list[/]")(list_variants)


def list_variants(load: LoadOption = None) -> None:
    """List the variants with their step size and decay."""
    from deltazoo.spec import choice_name, get_variant
    from deltazoo.spec import list_variants as names

    table = Table(title="deltazoo variants")
    for column in ("variant", "step size", "decay", "what is special", "paper"):
        table.add_column(column, no_wrap=column == "variant", overflow="fold")
    for name in names():
        spec = get_variant(name)
        step = choice_name(spec.step_size) if spec.corrects else "no correction"
        table.add_row(name, step, spec.decay, spec.summary, spec.paper.rpartition(", ")[2])
    Console().print(table)
