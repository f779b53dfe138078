"""Models made of models: ``deltazoo swap``, its layers trained by ``deltazoo distill``, and ``deltazoo export``."""

import json
import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deltazoo.cli.options import (
    CheckpointArgument,
    DeviceOption,
    LoadOption,
    OverrideOption,
    TextFieldOption,
    as_overrides,
    figures_table,
    print_facts,
    refuse,
    where_drawn,
    with_loads,
)
from deltazoo.compat.native.formats import FORMATS, TARGETS
from deltazoo.names import unknown
from deltazoo.spec import get_rule
from deltazoo.training.config import STAGES, DataConfig, Recipe, load_as
from deltazoo.training.console import console, no_transformers_bars, say
from deltazoo.training.data import open_text
from deltazoo.training.folder import (
    LOSS_PICTURE,
    check_run,
    check_writable,
    has_saved,
    held,
    saving_into,
    whole_or_not_at_all,
)
from deltazoo.training.loading import find_config, resolve_checkpoint

if TYPE_CHECKING:  # their modules import torch
    from deltazoo.training.distill import Distillation
    from deltazoo.training.evaluate import Ranking


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
    text: Annotated[str | None, typer.Option(help="Text to rank on (as data.text in a configuration).")] = None,
    text_field: TextFieldOption = "text",
    rank_tokens: Annotated[int, typer.Option(min=16, help="Upper limit of tokens to rank on.")] = 16384,
    output: Annotated[str | None, typer.Option(help="Folder for the model and the ranking.")] = None,
    load: LoadOption = None,
    device: DeviceOption = None,
) -> None:
    """Replace softmax attention by delta-rule layers, without training; --rank only measures the layers."""
    get_rule(rule)
    best_of = re.fullmatch(r"best:(\d+)", layers)
    best = None if best_of is None else int(best_of[1])
    ranks = rank or best is not None
    refuse(
        {
            "--text, --text-field and --rank-tokens act with --rank and --layers best:K only": not ranks
            and (text is not None or text_field != "text" or rank_tokens != 16384),
            "--rank measures every layer alone: leave out --layers and --dry-run": rank
            and (layers != "all" or dry_run),
            "say with --output where the swapped model goes, or look first with --dry-run": output is None
            and not (dry_run or rank),
            "ranking the layers needs a text: name one with --text": ranks and text is None,
            f"{output} holds a saved model (config.json): choose another --output": output is not None
            and (Path(output) / "config.json").is_file(),
        }
    )
    folder = None if output is None else Path(output)
    for name, written in (("ranking.json", ranks), ("model", not (rank or dry_run))):
        if folder is not None and written and (folder / name).exists():
            raise ValueError(f"{folder / name} exists already: choose another --output")
    source = None if text is None else open_text(DataConfig(text=text, text_field=text_field))
    model_path = resolve_checkpoint(path)

    # These import torch, after the arguments are checked.
    from deltazoo.swap import swap_attention
    from deltazoo.swap.families import decoder_layers_of, family_of
    from deltazoo.swap.plan import parse_layers
    from deltazoo.training.evaluate import rank_layers, ranking_rows
    from deltazoo.training.loading import load_checkpoint, load_model

    if best is None:
        try:
            parse_layers(layers)
        except ValueError as error:
            raise ValueError(
                f"--layers takes all, numbers such as 0,2,5, a ratio such as 3:1, or best:K, got {layers!r}"
            ) from error
    options: dict[str, Any] = {"init": init, "rope": rope, "qk_norm": qk_norm, "grouped": grouped}
    chosen: Any = layers
    with nullcontext() if folder is None else held(folder):
        # Only reading text and saving the model need the tokenizer.
        alone = dry_run and not ranks
        model, tokenizer = (load_model(model_path, device), None) if alone else load_checkpoint(model_path, device)
        if source is not None and tokenizer is not None:
            num_layers = len(decoder_layers_of(model, family_of(model.config)))
            if best is not None and not 1 <= best <= num_layers:
                raise ValueError(f"best:{best} asks for {best} of {num_layers} layers")
            ranking = rank_layers(model, rule, ranking_rows(model, tokenizer, source, rank_tokens), **options)
            Console().print(ranking_table(ranking))
            if folder is not None:
                ranking.save(folder / "ranking.json")
            if best is None:
                return
            chosen = ranking.best(best)
        Console().print(swap_attention(model, rule, layers=chosen, dry_run=dry_run, **options))
        if dry_run or folder is None or tokenizer is None:
            return
        with no_transformers_bars(), whole_or_not_at_all(folder / "model") as staging:
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
        distilling = ["deltazoo", "distill", str(folder), "--original", path, "--output", f"{folder}_distilled"]
        print_facts({"model": str(folder / "model"), "next": with_loads(distilling, load)})


def distill(
    context: typer.Context,
    path: CheckpointArgument,
    original: Annotated[
        str,
        typer.Option(help="The model whose attention was swapped: a folder or a Hub name. The layers learn from it."),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A YAML file, or swap_cpu or swap_gpu. Default: with --resume that of the run in --output, else the "
            "one for this machine."
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Training text: a file, a folder, or a Hub data set (data.text).")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Continue from the latest checkpoint.")] = False,
    output: Annotated[str | None, typer.Option(help="Folder of the run, instead of the recipe's.")] = None,
    override: OverrideOption = None,
    load: LoadOption = None,
) -> None:
    """Train a swapped model: align its new layers with the original's attention, distil the original, fine-tune.

    Ctrl-C saves a checkpoint before it stops.
    """
    overrides = list(override or [])
    overrides += as_overrides({"--text data.text": text, "--output output": output}, overrides)
    if recipe is None and resume and output is not None:
        recipe = output
    elif recipe is None:
        import torch

        recipe = "swap_gpu" if torch.cuda.is_available() else "swap_cpu"
    config = load_as(Recipe, find_config(recipe, recipes=True), overrides)
    folder = Path(config.output)
    model_path, original_path = resolve_checkpoint(path), resolve_checkpoint(original)
    if (folder / "model").resolve() == Path(model_path).resolve():
        raise ValueError(f"{folder} holds the swapped model itself: choose another --output")
    check_run(config, resume)
    open_text(config.data)

    # These import torch, after the arguments are checked.
    import torch

    from deltazoo.diagnosis.pictures import draw_distillation
    from deltazoo.training.distill import distill as train_stages
    from deltazoo.training.loading import load_checkpoint, load_model

    model, tokenizer = load_checkpoint(model_path, dtype=torch.float32)  # small updates would be lost in 16 bits
    rows = [
        (name, s.trains, f"{s.steps:,}", f"{s.steps * s.tokens_per_step:,}", f"{s.learning_rate:g}")
        for name, s in config.stages.items()
    ]
    headings = ("stage", "trains", "steps", "tokens", "learning rate")
    Console().print(figures_table(f"stages, on {config.data.text}", headings, rows))
    try:
        result = train_stages(model, load_model(original_path, dtype=torch.float32), tokenizer, config, resume=resume)
    except KeyboardInterrupt as stop:
        again = [argument for argument in context.obj if argument != "--resume"]
        go_on = f"stopped; to go on: {shlex.join(['deltazoo', *again, '--resume'])}"
        say(go_on if has_saved(folder, STAGES) else "stopped before anything was saved")
        raise typer.Exit(128 + getattr(stop, "signal", 2)) from stop
    Console().print(_scores_table(result, config))
    picture = where_drawn(lambda: draw_distillation(folder / LOSS_PICTURE, result.histories, result.scores, path))
    evaluating = with_loads(["deltazoo", "eval", str(folder)], load)
    print_facts({"model": str(result.model_path), "loss curves": picture, "next": evaluating})


def export(
    path: CheckpointArgument,
    to: Annotated[str, typer.Option(help=f"The format: {', '.join(TARGETS)}; deltazoo show says which a rule has.")],
    out: Annotated[Path, typer.Option(help="Folder to write: a new one or an empty one.")],
    check: Annotated[
        bool, typer.Option(help="Load it with transformers alone, and compare logits and greedy text in float32.")
    ] = True,
    load: LoadOption = None,
) -> None:
    """Write a model as a checkpoint that transformers, vLLM, MLX and others read without deltazoo.

    Tokenizer and generation config go with it. --to fla makes such a checkpoint one of ours.
    """
    if to not in TARGETS:
        raise ValueError(unknown("target", to, TARGETS))
    check_writable(out)
    path = resolve_checkpoint(path)

    import transformers

    from deltazoo.compat.native import export as write
    from deltazoo.compat.native import load_native_checkpoint
    from deltazoo.compat.native.checkpoints import refuse_occupied
    from deltazoo.training.loading import load_model, load_tokenizer

    refuse_occupied(out.absolute())
    written = Path(path) / "config.json"
    is_native = written.is_file() and json.loads(written.read_text(encoding="utf-8")).get("model_type") in FORMATS
    with console.status(f"exporting {path}"), no_transformers_bars(), saving_into(out):
        model = load_native_checkpoint(path) if is_native else load_model(path, "cpu")
        try:
            tokenizer = load_tokenizer(path)
        except ValueError:
            tokenizer = None
        try:
            found = write(model, to, out, tokenizer=tokenizer, check=check)
        except TypeError as error:  # a swapped model, or one without a head for tokens
            raise ValueError(str(error)) from error
    if tokenizer is None:
        say(f"{path} holds no tokenizer that transformers can load, so none was written")
    alone = "our reader of its format" if to == "fla" else f"transformers {transformers.__version__} alone"
    compared = "not checked"
    if found is not None:
        compared = (
            f"with {alone}: logits of two rows differ by at most {found.difference:.1e}, the largest is "
            f"{found.largest:.3g}; {found.new_tokens} greedy tokens of each are equal"
        )
    print_facts({"written": str(out), "format": to, "checked": compared})


def ranking_table(ranking: "Ranking") -> Table:
    """A table of the layers, the smallest rise in loss first."""
    rows = [
        (str(layer), f"{ranking.losses[layer]:.4f}", f"{ranking.losses[layer] - ranking.loss:+.4f}")
        for layer in ranking.order
    ]
    title = f"one layer swapped for {ranking.rule} after transfer, {ranking.tokens:,} tokens"
    return figures_table(title, ("layer", "loss, nats per token", "rise"), [*rows, ("none", f"{ranking.loss:.4f}", "")])


def _scores_table(result: "Distillation", config: Recipe) -> Table:
    """A table of held-out bits per byte after each stage."""
    names = {"original": "original", "transfer": "swapped, before training"}
    gap = result.scores["transfer"] - result.scores["original"]
    rows = []
    for name, bits in result.scores.items():
        recovered = f"{(result.scores['transfer'] - bits) / gap:.1%}" if name not in names and gap > 0 else ""
        rows.append((names.get(name, f"after {name}"), f"{bits:.3f}", recovered))
    return figures_table("distillation", ("", "held-out bits per byte", "gap recovered"), rows)
