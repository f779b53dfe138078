"""``deltazoo check RULE.py``: check what every rule of the package promises."""

import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from deltazoo.cli.rule_files import LoadOption, load_rule_file


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("check", epilog="Example: [bold]deltazoo check my_rule.py[/]")(check)


def check(
    context: typer.Context,
    rule: Annotated[str, typer.Argument(help="Python file that registers a rule, or the name of a rule.")],
    load: LoadOption = None,
) -> None:
    """Check a rule on a CPU, in under a minute: definition, gradients, cache, padding, packing, reload, swap."""
    from deltazoo.spec import get_rule

    if rule.endswith(".py") or Path(rule).is_file():
        names = load_rule_file(rule)
        if not names:
            raise ValueError(f"{rule} registers no rule: call deltazoo.register_rule in it")
    else:
        names = [get_rule(rule).name]

    from deltazoo.checks import check_rule

    console = Console()
    failed = 0
    for name in names:
        console.print(Text(name, style="bold"))
        for finding in check_rule(name):
            mark = ("  ok    ", "green") if finding.problem is None else ("  WRONG ", "bold red")
            console.print(Text.assemble(mark, finding.title))
            if finding.problem is not None:
                failed += 1
                console.print(Text(finding.problem), soft_wrap=True)
            if finding.error is not None and context.find_root().params["traceback"]:
                console.print(Text("".join(traceback.format_exception(finding.error))), soft_wrap=True)
            if finding.remark is not None:
                console.print(Text(finding.remark), soft_wrap=True)
    if failed:
        console.print(Text(f"{failed} {'check has' if failed == 1 else 'checks have'} found something wrong."))
        raise typer.Exit(1)
    console.print(Text("The rule keeps every promise checked here."))
