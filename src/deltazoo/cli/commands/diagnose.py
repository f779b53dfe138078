"""``deltazoo diagnose PATH``: what the delta-rule layers of a model do on a text, and what looks wrong."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import CheckpointArgument, DeviceOption, TextFieldOption
from deltazoo.cli.rule_files import LoadOption

_EXAMPLE = (
    "Examples: [bold]deltazoo diagnose runs/quickstart[/], "
    "[bold]deltazoo diagnose runs/quickstart --text my_texts --picture layers.png[/]"
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("diagnose", epilog=_EXAMPLE)(diagnose)


def diagnose(
    path: CheckpointArgument,
    text: Annotated[
        str | None,
        typer.Option(help="This text (as data.text in a configuration), not the run's held-out part."),
    ] = None,
    text_field: TextFieldOption = "text",
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of a document; the rest of it is left out. Default: 2048, or the model's number of learned "
            "positions if that is smaller.",
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(min=2, help="No document is added beyond so many tokens in all; the first one is always there."),
    ] = 8192,
    picture: Annotated[str | None, typer.Option(help="Also draw heat maps of all heads into this PNG.")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="Also write all figures to this file.")] = None,
    load: LoadOption = None,
    device: DeviceOption = None,
) -> None:
    """Erase gains, half-lives of decays, norms of states and saturated gates of every layer; warnings in sentences."""
    from deltazoo.cli.output_files import check_output_file
    from deltazoo.training.config import DataConfig
    from deltazoo.training.documents import choose_documents

    if text is None and text_field != DataConfig.text_field:
        raise ValueError("--text-field acts on --text only")
    check_output_file("--picture", picture)
    check_output_file("--json", json_file)
    if picture is not None and Path(picture).suffix.lower() != ".png":
        raise ValueError(f"--picture writes a PNG: give a name that ends in .png, not {picture}")
    data = None if text is None else DataConfig(text=text, text_field=text_field)
    documents = choose_documents(path, data, max_bytes=None if text is None else 64 * tokens)

    import deltazoo
    from deltazoo.generation.position_limit import check_positions, learned_positions
    from deltazoo.training.checkpoint_files import as_json
    from deltazoo.training.loading import load_checkpoint
    from deltazoo.training.text_batch import text_batch

    model, tokenizer = load_checkpoint(path, device)
    if length is None:
        length = min(2048, learned_positions(model) or 2048)
    check_positions(model, length, f"documents of --length {length}")
    found = deltazoo.diagnose(model, text_batch(tokenizer, documents.held_out, length, tokens))
    typer.echo(f"{documents.description}\n{found}")
    if picture is not None:
        found.save_picture(picture)
    if json_file is not None:
        Path(json_file).write_text(as_json(found.records(), indent=1), encoding="utf-8")
    if found.not_finite is not None:
        raise typer.Exit(1)
