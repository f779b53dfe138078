"""The ``deltazoo`` command. Each file of ``deltazoo.cli.commands`` is one command."""

from deltazoo.cli.app import main

__all__ = ["main"]
