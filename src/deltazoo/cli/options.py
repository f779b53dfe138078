"""Arguments and options that several commands have, with their checks, and the tables that they print."""

import errno
import importlib.util
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltazoo import spec
from deltazoo.training.folder import check_writable
from deltazoo.training.loading import check_device


def load_rule_file(path: str | Path) -> list[str]:
    """Names of the rules that a Python file registers, after importing it once per process.

    The module has the file's name, as after `import my_rule`. Models record that name.

    Raises:
        ValueError: no such file, a name that another module has, or an error in the file, with its line. Rules that
            the file registered before the error are forgotten.
    """
    path = Path(path).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r} to load")
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return _registered_by(name)
    found = importlib.util.find_spec(name) if name.isidentifier() and loaded is None else None
    if loaded is not None or not name.isidentifier() or (found is not None and found.origin != str(path)):
        raise ValueError(
            f"{path} cannot be loaded as a module {name!r}: another module has that name, or none can: rename it"
        )
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise ValueError(f"{path} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(specification)
    # Registered before it runs: other processes find its definitions by the module's name.
    sys.modules[name] = module
    try:
        with spec.forgotten_on_error():
            specification.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            where = f", line {lines[-1]}" if lines else ""
            raise ValueError(f"{path}{where}: {type(error).__name__}: {error}") from error
        raise
    return _registered_by(name)


def _registered_by(module: str) -> list[str]:
    return [name for name in spec.list_rules() if spec.registering_module(name) == module]


def check_output_file(option: typer.CallbackParam, file: Any) -> Any:
    """The file that an option names, if any; ValueError if it cannot be one, or cannot be written."""
    if file is None:
        return None
    path = Path(file)
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {str(path.parent)!r} for {option.opts[0]} {file}")
    if path.exists() and not path.is_file():
        kind = "folder" if path.is_dir() else "device"
        raise ValueError(f"{option.opts[0]} names the file to write, and {file} is a {kind}")
    check_writable(path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"cannot write {option.opts[0]} {file}: {os.strerror(errno.EACCES)}")
    return file


def refuse(reasons: dict[str, bool]) -> None:
    """Raise ValueError with the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(reason)


def as_overrides(options: dict[str, str | None], overrides: Sequence[str] = ()) -> list[str]:
    """Overrides that set what options say: "--option section.key" -> its value, None if it was not given.

    Raises:
        ValueError: the user's own overrides set the key of a given option as well.
    """
    found = []
    for names, given in options.items():
        option, key = names.split()
        if given is not None and any(override.partition("=")[0].strip() == key for override in overrides):
            raise ValueError(f"{option} {given} and --set {key} say the same thing: give one of them")
        if given is not None:
            found.append(f"{key}={json.dumps(given)}")  # JSON: a string whatever its characters
    return found


def where_drawn(draw: Callable[[], Path]) -> str:
    """The path of a picture, or the sentence of an ImportError that says why there is none."""
    try:
        return str(draw())
    except ImportError as error:
        return f"not drawn: {error}"


def with_loads(command: list[str], load: list[Path] | None) -> str:
    """A command to copy, with the files of rules that this one has loaded."""
    return shlex.join([*command, *(part for path in load or [] for part in ("--load", str(path)))])


def print_facts(facts: dict[str, str]) -> None:
    """Print names and values in two columns; no line is broken, so that commands and paths can be copied."""
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        line = Text.assemble((name.ljust(width), "bold"), value)  # brackets are no markup
        Console().print(line, soft_wrap=True, highlight=False)


def figures_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Rows of a name and figures."""
    table = Table(headings[0], title=title)
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _load_all(paths: list[Path] | None) -> list[Path]:
    for path in (paths := paths or []):
        load_rule_file(path)
    return paths


def _checked(device: str | None) -> str | None:
    if device is not None:
        check_device(device)
    return device


# Devices and files are checked, and rules loaded, while arguments are parsed.
CheckpointArgument = Annotated[str, typer.Argument(help="Folder of a model or of a training run, or a Hub name.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if there is one.", callback=_checked)
]
JsonOption = Annotated[
    str | None, typer.Option("--json", help="Also write all figures to this file.", callback=check_output_file)
]
LoadOption = Annotated[
    list[Path] | None,
    typer.Option("--load", help="Python file that registers a rule; may be repeated.", callback=_load_all),
]
OverrideOption = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value; replaces one value; may be repeated.")
]
HeldOutTextOption = Annotated[
    str | None,
    typer.Option("--text", help="All of this text (as data.text in a configuration), not the run's held-out part."),
]
TextFieldOption = Annotated[str, typer.Option(help="Column of the text in JSONL, Parquet and Hub records.")]
