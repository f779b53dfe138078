"""Every `deltazoo` command in the documentation names a command and options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from deltazoo.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
COMMAND = re.compile(r"(?:^ {4,}|`)(?:\.venv/bin/)?(?:torchrun [^`\n]*-m )?deltazoo +([a-z][^`\n]*)", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """Page and words behind `deltazoo`, from lines indented by four, code blocks and inline code."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))  # commands that go on in the next line
        for fenced in COMMAND.finditer(text):
            found += [(page.name, line.strip()) for line in re.split(r";\s*deltazoo ", fenced[1].split("#")[0])]
    return found


def check(words: list[str], command: Any) -> None:
    """Raise AssertionError at a word that is neither an option of the command nor one of its subcommands."""
    if command.context_settings.get("ignore_unknown_options"):  # they are another program's
        return None
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for position, word in enumerate(words):
        if word in getattr(command, "commands", {}):
            return check(words[position + 1 :], command.commands[word])
        assert not word.startswith("--") or word.split("=")[0] in {*options, "--help"}, word
    return None


def test_there_are_commands_to_check() -> None:
    assert len(commands()) > 30


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: value.replace("/", "_")[:60])
def test_command_and_options_exist(page: str, line: str) -> None:
    group: Any = typer.main.get_command(app)
    words = shlex.split(line)
    assert words[0] in group.commands, f"{page}: deltazoo {line}"
    check(words[1:], group.commands[words[0]])
