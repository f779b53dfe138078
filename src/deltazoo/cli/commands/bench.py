"""``deltazoo bench``: time the operators, or check the kernels on this machine."""

import typer

from benchmarks.command import app as bench


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.add_typer(bench, name="bench")
