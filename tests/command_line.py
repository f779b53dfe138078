"""The command `deltazoo` in the process of a test."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO

import pytest

from deltazoo.cli import main


def call(*arguments: str) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


def refused(*arguments: str) -> str:
    """What a command that ends with status 1 prints, as one line."""
    outcome = invoke(*arguments)
    assert outcome.exit_code == 1, outcome.output
    return outcome.output


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    output: str


def invoke(*arguments: str) -> Outcome:
    """The exit status of the command, and what it prints on both streams, as one line."""
    with StringIO() as printed:
        with redirect_stdout(printed), redirect_stderr(printed):
            status = call(*arguments)
        return Outcome(status, " ".join(printed.getvalue().split()))
