"""The command `deltazoo` in the process of a test."""

from __future__ import annotations

import pytest

from deltazoo.workbench.cli import main


def call(*arguments: str) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)
