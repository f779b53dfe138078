"""Arguments and options that several commands have."""

from typing import Annotated

import typer

from deltazoo.training.device import check_device

__all__ = ["CheckpointArgument", "DeviceOption", "TextFieldOption"]


def _checked(device: str | None) -> str | None:
    if device is not None:
        check_device(device)
    return device


CheckpointArgument = Annotated[str, typer.Argument(help="Folder of a model or of a training run, or a Hub name.")]
TextFieldOption = Annotated[str, typer.Option(help="Column of the text in JSONL, Parquet and Hub records.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if there is one.", callback=_checked)
]
"""Checked while arguments are parsed."""
