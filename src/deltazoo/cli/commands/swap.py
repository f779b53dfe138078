"""``deltazoo swap PATH``: replace softmax attention of a transformers model by delta-rule layers, and train it."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deltazoo.cli.options import CheckpointArgument, DeviceOption, TextFieldOption
from deltazoo.cli.rule_files import LoadOption

if TYPE_CHECKING:
    from deltazoo.training.conversion_config import ConversionConfig
    from deltazoo.training.layer_ranking import Ranking

_EXAMPLE = (
    "Examples: [bold]deltazoo swap my_llama --rule kda --layers 3:1 --dry-run[/], "
    "[bold]deltazoo swap my_llama --rule kda --rank --text my_texts --output runs/rank[/], "
    "[bold]deltazoo swap my_llama --rule kda --layers best:8 --train recipe.yaml --output runs/kda[/]"
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("swap", epilog=_EXAMPLE)(swap)


def swap(
    path: CheckpointArgument,
    rule: Annotated[str, typer.Option(help="Rule of the new layers; see deltazoo list.")],
    layers: Annotated[
        str, typer.Option(help="all, numbers (0,2,5), delta-rule to softmax layers (3:1), or best:K of a ranking.")
    ] = "all",
    init: Annotated[str, typer.Option(help="transfer: copy the model's weights; random: new weights.")] = "transfer",
    rope: Annotated[bool, typer.Option(help="Keep the rotary embedding of queries and keys.")] = True,
    qk_norm: Annotated[bool, typer.Option(help="Keep the norms of queries and keys.")] = True,
    grouped: Annotated[bool, typer.Option(help="Keep keys and values of grouped-query attention shared.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only report what would happen.")] = False,
    rank: Annotated[
        bool, typer.Option(help="Only measure, on --text, the loss added by swapping each layer alone.")
    ] = False,
    text: Annotated[
        str | None, typer.Option(help="Text to rank on (as data.text in a configuration); default: that of --train.")
    ] = None,
    text_field: TextFieldOption = "text",
    rank_tokens: Annotated[int, typer.Option(min=16, help="Upper limit of tokens to rank on.")] = 16384,
    train: Annotated[
        str | None, typer.Option(help="Train after the swap, by this recipe: a YAML file, or swap_cpu or swap_gpu.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value of --train; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Continue the conversion in --output.")] = False,
    output: Annotated[str | None, typer.Option(help="Folder for the model, the ranking and the conversion.")] = None,
    load: LoadOption = None,
    device: DeviceOption = None,
) -> None:
    """Replace softmax attention by delta-rule layers; --rank measures layers first, --train trains the result."""
    from deltazoo.cli.tables import facts_table, stages_table
    from deltazoo.spec import get_rule
    from deltazoo.training.checkpoint_path import resolve_checkpoint
    from deltazoo.training.config import DataConfig
    from deltazoo.training.conversion_config import STAGES, load_conversion
    from deltazoo.training.presets import find_config
    from deltazoo.training.run_folder import check_run

    get_rule(rule)
    best = _number_of_best(layers)
    ranks = rank or best is not None
    _refuse_without_effect(
        {
            "--train acts on a swap, not with --rank": bool(train) and rank,
            "--set and --resume act with --train only": train is None and bool(override or resume),
            "--resume goes on with a run, and --dry-run starts none": resume and dry_run,
            "--text, --text-field and --rank-tokens act with --rank and --layers best:K only": not ranks
            and (text is not None or text_field != "text" or rank_tokens != 16384),
            "--rank measures every layer alone: leave out --layers and --dry-run": rank
            and (layers != "all" or dry_run),
        }
    )
    if output is None and not (dry_run or rank):
        raise ValueError("say with --output where the swapped model goes, or look first with --dry-run")
    if output is not None and (Path(output) / "config.json").is_file():
        raise ValueError(f"{output} holds a saved model (config.json): choose another --output")
    recipe = None
    if train is not None:
        folder_of_run = [] if output is None else [f"output={output}"]
        recipe = load_conversion(find_config(train, conversions=True), [*(override or []), *folder_of_run])
    if ranks and text is None and recipe is None:
        raise ValueError("ranking the layers needs a text: name one with --text")
    folder = None if output is None else Path(output)
    if recipe is not None and folder is not None:
        check_run(recipe, folder, resume, load=load_conversion, stages=STAGES)
    written = ["ranking.json", "ranking.png"] if ranks else []
    if recipe is None and not (rank or dry_run):
        written.append("model")
    for name in written:
        if folder is not None and not resume and (folder / name).exists():
            raise ValueError(f"{folder / name} exists already: choose another --output")
    path = resolve_checkpoint(path)

    # These import torch, after the arguments are checked.
    from deltazoo.swap import swap_attention
    from deltazoo.swap.families import decoder_layers_of, family_of
    from deltazoo.training.conversion import check_row_lengths, save_swapped
    from deltazoo.training.layer_ranking import check_best, rank_layers, ranking_rows
    from deltazoo.training.loading import load_checkpoint, load_model

    options: dict[str, Any] = {"init": init, "rope": rope, "qk_norm": qk_norm, "grouped": grouped}
    console = Console()
    chosen: Any = layers
    # Only reading text and saving the model need the tokenizer.
    model, tokenizer = (load_model(path, device), None) if dry_run and not ranks else load_checkpoint(path, device)
    if recipe is not None:
        check_row_lengths(model, recipe)
        model.float()  # small updates would be lost in 16-bit parameters
    if ranks:
        assert tokenizer is not None
        if best is not None:
            check_best(best, len(decoder_layers_of(model, family_of(model.config))))
        data = recipe.data if text is None and recipe else DataConfig(text=str(text), text_field=text_field)
        rows = ranking_rows(model, tokenizer, data, held_out=text is None, max_tokens=rank_tokens)
        ranking = rank_layers(model, rule, rows, **options)
        named = [] if best is None else ranking.best(best)
        chosen = named or layers
        _show_ranking(ranking, named, folder)
    if rank:
        return

    report = swap_attention(model, rule, layers=chosen, dry_run=dry_run, keep_teacher=bool(recipe), **options)
    console.print(report)
    if dry_run and recipe is not None:
        console.print(stages_table(recipe))
    if dry_run or folder is None or tokenizer is None:
        return
    if recipe is None:
        facts = {"model": str(save_swapped(model, tokenizer, folder))}
    else:
        title = f"{rule} in {len(report.layers)} of {report.num_layers} attention slots of {path}"
        facts = _convert(model, tokenizer, recipe, folder, title, resume=resume)
    console.print(facts_table({**facts, "next": f'deltazoo generate {facts["model"]} --prompt "def "'}))


def _number_of_best(layers: str) -> int | None:
    """K of best:K; None for what `parse_layers` takes, ValueError for anything else."""
    from deltazoo.swap.plan import parse_layers

    if best := re.fullmatch(r"best:(\d+)", layers):
        return int(best[1])
    try:
        parse_layers(layers)
    except ValueError as error:
        raise ValueError(
            f"--layers takes all, numbers such as 0,2,5, a ratio such as 3:1, or best:K, got {layers!r}"
        ) from error
    return None


def _show_ranking(ranking: "Ranking", chosen: list[int], folder: Path | None) -> None:
    """Print a ranking; with a folder keep it there, and draw it."""
    from deltazoo.cli.tables import facts_table, ranking_table
    from deltazoo.training.conversion_plots import draw_ranking

    console = Console()
    console.print(ranking_table(ranking))
    if folder is not None:
        ranking.save(folder / "ranking.json")
        console.print(facts_table({"picture": str(draw_ranking(folder / "ranking.png", ranking, chosen))}))


def _convert(
    model: Any, tokenizer: Any, recipe: "ConversionConfig", folder: Path, title: str, *, resume: bool
) -> dict[str, str]:
    """Train the swapped model, and print and draw its scores; returns where the model and the picture are."""
    from deltazoo.cli.tables import conversion_table
    from deltazoo.training.console import say
    from deltazoo.training.conversion import convert
    from deltazoo.training.conversion_config import STAGES
    from deltazoo.training.conversion_plots import draw_conversion
    from deltazoo.training.run_folder import LOSS_PICTURE, has_saved

    try:
        result = convert(model, tokenizer, recipe, resume=resume)
    except KeyboardInterrupt as stop:
        saved = has_saved(folder, STAGES)
        say("stopped; the same command with --resume goes on" if saved else "stopped before anything was saved")
        raise typer.Exit(128 + getattr(stop, "signal", 2)) from stop
    Console().print(conversion_table(result))
    histories = {name: stage.history for name, stage in result.stages.items()}
    picture = draw_conversion(folder / LOSS_PICTURE, histories, result.scores, title)
    return {"model": str(result.model_path), "loss curves": str(picture)}


def _refuse_without_effect(rules: dict[str, bool]) -> None:
    for message, broken in rules.items():
        if broken:
            raise ValueError(message)
