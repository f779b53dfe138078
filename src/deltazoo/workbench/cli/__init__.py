"""The ``deltazoo`` command. Each file of ``deltazoo.workbench.cli.commands`` is one command."""

from deltazoo.workbench.cli.app import main

__all__ = ["main"]
