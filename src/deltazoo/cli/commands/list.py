"""``deltazoo list``: the rules."""

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from deltazoo.cli.rule_files import LoadOption


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("list", epilog="Example: [bold]deltazoo list[/]")(list_rules)


def list_rules(load: LoadOption = None) -> None:
    """List the rules with their step size and decay."""
    from deltazoo.spec import choice_name, get_rule
    from deltazoo.spec import list_rules as names

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("rule", "decay", "step size", "what is special", "arXiv"):
        table.add_column(column, no_wrap=column != "what is special", overflow="fold")
    for name in names():
        spec = get_rule(name)
        step = choice_name(spec.step_size) if spec.corrects else "no erase"
        if spec.num_micro_steps > 1:
            step = f"{spec.num_micro_steps} x {step}"
        table.add_row(name, spec.decay, step, spec.summary, spec.paper.partition("arXiv:")[2] or "-")
    Console().print(table)
