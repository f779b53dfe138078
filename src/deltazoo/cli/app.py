"""Collect the commands, run one, and report bad input in one line with exit status 1."""

import importlib
import pkgutil
import sys
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.text import Text

from deltazoo import __version__
from deltazoo.cli import commands

_BAD_INPUT = (ValueError, KeyError, OSError, NotImplementedError, ArithmeticError, ImportError)
_options = {"traceback": False}


def build_app() -> typer.Typer:
    """The application with every command found in ``deltazoo.cli.commands``.

    A command is a module with a function ``register(app)``. Slow imports belong inside the command's function, so that
    ``deltazoo --help`` is quick.
    """
    app = typer.Typer(
        name="deltazoo",
        help="The model zoo for delta-rule linear attention.",
        rich_markup_mode="rich",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def common(
        traceback: bool = typer.Option(False, "--traceback", help="Show the Python traceback of an error."),
        version: bool = typer.Option(
            False, "--version", help="Print the version and stop.", is_eager=True, callback=_print_version
        ),
    ) -> None:
        _options["traceback"] = traceback

    for module in sorted(pkgutil.iter_modules(commands.__path__), key=lambda found: found.name):
        importlib.import_module(f"{commands.__name__}.{module.name}").register(app)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with status 0, 1 after bad input, or 128 + n after the signal n."""
    _options["traceback"] = False
    try:
        build_app()(args=None if arguments is None else list(arguments), prog_name="deltazoo")
    except SystemExit as stop:
        # click exits with 2 after wrong usage; scripts get one status for all bad input.
        by_signal = isinstance(stop.code, int) and stop.code > 128
        sys.exit(stop.code if by_signal else 0 if stop.code in (0, None) else 1)
    except _BAD_INPUT as error:
        if _options["traceback"]:
            raise
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        console = Console(stderr=True)
        console.print(Text.assemble(("Error: ", "bold red"), str(message)))
        sys.exit(1)
