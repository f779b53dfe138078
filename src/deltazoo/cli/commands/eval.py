"""``deltazoo eval PATH``: bits per byte and perplexity on held-out text, compared with baselines."""

from typing import Annotated

import typer
from rich.console import Console

from deltazoo.cli.options import CheckpointArgument, DeviceOption, TextFieldOption
from deltazoo.cli.rule_files import LoadOption

_EXAMPLE = (
    "Examples: [bold]deltazoo eval runs/quickstart[/], "
    "[bold]deltazoo eval runs/quickstart --text my_texts --json score.json[/]"
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("eval", epilog=_EXAMPLE)(evaluate)


def evaluate(
    path: CheckpointArgument,
    text: Annotated[
        str | None,
        typer.Option(help="Score all of this text (as data.text in a configuration), not the run's held-out part."),
    ] = None,
    text_field: TextFieldOption = "text",
    max_bytes: Annotated[int | None, typer.Option(min=1, help="Stop reading --text after this many bytes.")] = None,
    primed: Annotated[bool, typer.Option(help="Also measure xz with the training text read before.")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="Also write the scores to this file.")] = None,
    load: LoadOption = None,
    device: DeviceOption = None,
) -> None:
    """Score a model on held-out text, and compare it with gzip, xz and an order-2 byte model."""
    from deltazoo.cli.output_files import check_output_file
    from deltazoo.cli.tables import comparison_table, facts_table
    from deltazoo.training.config import DataConfig
    from deltazoo.training.documents import choose_documents

    if text is None and (max_bytes is not None or text_field != DataConfig.text_field):
        raise ValueError("--max-bytes and --text-field act on --text only")
    check_output_file("--json", json_file)
    data = None if text is None else DataConfig(text=text, text_field=text_field)
    documents = choose_documents(path, data, max_bytes)
    from deltazoo.training import score_documents
    from deltazoo.training.comparison import baselines, save_comparison
    from deltazoo.training.loading import load_checkpoint

    model, tokenizer = load_checkpoint(path, device)
    score = score_documents(model, tokenizer, documents.held_out)
    others = baselines(documents.train, documents.held_out, primed=primed)
    rule = getattr(model.config, "mixer", model.config.model_type)
    name = f"{rule}, {model.num_parameters() / 1e6:.1f} M"
    console = Console()
    console.print(comparison_table(name, score, others))
    console.print(
        facts_table(
            {
                "text": documents.description,
                "perplexity": f"{score.perplexity:.2f} per token of this tokenizer ({len(tokenizer)} entries)",
                "speed": f"{score.tokens_per_second:,.0f} tokens/s",
            }
        )
    )
    if json_file:
        save_comparison(json_file, path, documents.description, score, others)
