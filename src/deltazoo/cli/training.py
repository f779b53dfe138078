"""``deltazoo train``, a run from a preset or a YAML file, and ``deltazoo swap``, new layers and their training."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltazoo.cli.options import CheckpointArgument, DeviceOption, LoadOption, OverrideOption, TextFieldOption, refuse
from deltazoo.spec import get_rule
from deltazoo.training.checkpoint_files import checkpoints
from deltazoo.training.checkpoint_path import resolve_checkpoint
from deltazoo.training.config import DataConfig, RunConfig, load_config
from deltazoo.training.console import say
from deltazoo.training.conversion_config import STAGES, ConversionConfig, load_conversion
from deltazoo.training.presets import find_config, is_for_gpus, rule_overrides
from deltazoo.training.run_folder import LOSS_PICTURE, check_run, has_saved
from deltazoo.training.text import open_text

if TYPE_CHECKING:  # these import torch, which waits until the arguments are checked
    from deltazoo.training.conversion import ConversionResult
    from deltazoo.training.layer_ranking import Ranking


def train(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, the name of a preset, or the folder of a run. With --text, the quickstart of this "
            "machine unless given."
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="Rule of the model (deltazoo list); in paper_340m, paper_1.3b and hybrid_340m, in the shape of its "
            "paper (deltazoo show)."
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="Training text: a file, a folder, or a Hub data set (data.text). data.subset, data.split and "
            "data.streaming of the configuration then have their defaults."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Continue from the latest checkpoint; with more training.steps, past the end.")
    ] = False,
    output: Annotated[str | None, typer.Option(help="Folder of the run, instead of the configuration's.")] = None,
    override: OverrideOption = None,
    load: LoadOption = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Processes to start, one per GPU; the rows of a step are divided among them."),
    ] = None,
    context_parallel: Annotated[
        int | None,
        typer.Option(min=1, help="How many GPUs share each sequence (training.context_parallel)."),
    ] = None,
) -> None:
    """Train a model, save it with its tokenizer, and draw its loss curve.

    Ctrl-C saves a checkpoint before it stops.
    """
    overrides = list(override or [])
    if context_parallel is not None:
        overrides.append(f"training.context_parallel={context_parallel}")
    run = configuration(config, rule, text, output, overrides)
    check_run(run, Path(run.output), resume)
    started = os.environ.get("WORLD_SIZE")  # set by torchrun and accelerate launch
    processes = int(started) if started else gpus or 1
    if gpus not in (None, processes):
        raise ValueError(f"--gpus {gpus}: the command runs in {started} processes already; leave --gpus out")
    run.training.divided(processes)
    if started is None and config is not None and is_for_gpus(config):
        import torch

        if not torch.cuda.is_available():
            say(f"{config} is a preset for GPUs, and there is none here: it may take very long, or run out of memory")
    if started is None and processes > 1:
        _run_in_processes(processes, context.obj)

    from accelerate import PartialState
    from torch import distributed

    from deltazoo.training import train as train_run
    from deltazoo.training.pictures import draw_loss_curve

    try:
        result = train_run(run, resume=resume)
    except KeyboardInterrupt as stop:
        if PartialState().is_main_process:
            in_processes = "" if processes == 1 else f" --gpus {processes}"
            go_on = f"deltazoo train {shlex.quote(run.output)} --resume{in_processes}"
            saved = checkpoints(Path(run.output))
            say(f"stopped; saved in {saved[-1]}. To go on: {go_on}" if saved else "stopped before anything was saved")
        raise typer.Exit(128 + getattr(stop, "signal", 2)) from stop
    is_main_process = PartialState().is_main_process
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()  # its threads can abort the process at exit
    if is_main_process:
        title = f"{run.model_name}, {result.num_parameters / 1e6:.1f} M parameters, {result.corpus.description}"
        picture = Path(run.output) / LOSS_PICTURE
        drawn = _drawn(lambda: draw_loss_curve(result.log_history, picture, title, result.tokens_per_step))
        last = [entry for entry in result.log_history if "eval_loss" in entry][-1]
        facts = {
            "model": str(result.model_path),
            "parameters": f"{result.num_parameters:,}",
            "device": f"{result.device}, {result.precision}",
            "training": f"{result.seconds:,.0f} s, {result.tokens_per_second:,.0f} tokens/s",
            "held-out loss": f"{last['eval_loss']:.3f} nats per token, {last['eval_bits_per_byte']:.3f} bits per byte",
            "loss curve": drawn,
            "next": f"deltazoo eval {run.output}",
            "": f'deltazoo generate {run.output} --prompt "def "',
        }
        Console().print(facts_table(facts))


def configuration(
    name: str | None, rule: str | None, text: str | None, output: str | None, overrides: list[str]
) -> RunConfig:
    """The configuration of a run, checked as far as possible without torch.

    Raises:
        ValueError: neither a configuration nor a text is given, or it does not exist.
    """
    if name is None and text is None:
        raise ValueError("name a configuration, or a text with --text; deltazoo train --help has examples")
    for option, key, given in (
        ("--rule", "model.mixer", rule),
        ("--text", "data.text", text),
        ("--output", "output", output),
    ):
        if given is not None and any(override.partition("=")[0].strip() == key for override in overrides):
            raise ValueError(f"{option} {given} and --set {key} say the same thing: give one of them")
    if text is not None:
        # A data set's subset, split and streaming do not belong to another text.
        reset = [f"data.{key}={json.dumps(getattr(DataConfig, key))}" for key in ("subset", "split", "streaming")]
        overrides = [*reset, f"data.text={json.dumps(text)}", *overrides]  # JSON: a string whatever its characters
    if output is None and name is not None and Path(name).is_dir():
        output = name
    elif output is None and name is None and text is not None:
        output = f"runs/{Path(os.path.abspath(text)).stem or 'text'}"  # also of . and ..
    if output is not None:
        overrides = [*overrides, f"output={json.dumps(output)}"]
    if name is None:
        open_text(DataConfig(text=str(text)))  # before torch is asked for a GPU
        import torch

        name = "quickstart_gpu" if torch.cuda.is_available() else "quickstart_cpu"
    path = find_config(name)
    run = load_config(path, [*(rule_overrides(path, rule) if rule else []), *overrides])
    open_text(run.data)
    return run


def _run_in_processes(processes: int, arguments: list[str]) -> NoReturn:
    """Replace this process by torchrun, which runs ``deltazoo`` with the same arguments in every process.

    Without a GPU the processes compute on the CPU. Signals and the exit status are torchrun's.

    Raises:
        ValueError: the machine has GPUs, and fewer than that.
    """
    import torch

    gpus = torch.cuda.device_count()
    if 0 < gpus < processes:
        raise ValueError(f"--gpus {processes}: this machine has {gpus} {'GPU' if gpus == 1 else 'GPUs'}")
    if gpus == 0:
        say(f"no GPU: {processes} processes on the CPU")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*torchrun, "-m", "deltazoo", *arguments])


def _drawn(draw: Callable[[], Path]) -> str:
    """Where a picture is, or the sentence of an ImportError that says why there is none."""
    try:
        return str(draw())
    except ImportError as error:
        return f"not drawn: {error}"


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
    override: OverrideOption = None,
    resume: Annotated[bool, typer.Option(help="Continue the conversion in --output.")] = False,
    output: Annotated[str | None, typer.Option(help="Folder for the model, the ranking and the conversion.")] = None,
    load: LoadOption = None,
    device: DeviceOption = None,
) -> None:
    """Replace softmax attention by delta-rule layers; --rank measures layers first, --train trains the result."""
    get_rule(rule)
    best_of = re.fullmatch(r"best:(\d+)", layers)
    best = None if best_of is None else int(best_of[1])
    ranks = rank or best is not None
    refuse(
        {
            "--train acts on a swap, not with --rank": bool(train) and rank,
            "--set and --resume act with --train only": train is None and bool(override or resume),
            "--resume goes on with a run, and --dry-run starts none": resume and dry_run,
            "--text, --text-field and --rank-tokens act with --rank and --layers best:K only": not ranks
            and (text is not None or text_field != "text" or rank_tokens != 16384),
            "--rank measures every layer alone: leave out --layers and --dry-run": rank
            and (layers != "all" or dry_run),
            "say with --output where the swapped model goes, or look first with --dry-run": output is None
            and not (dry_run or rank),
            f"{output} holds a saved model (config.json): choose another --output": output is not None
            and (Path(output) / "config.json").is_file(),
        }
    )
    folder = None if output is None else Path(output)
    recipe = None
    if train is not None:
        folder_of_run = [] if output is None else [f"output={output}"]
        recipe = load_conversion(find_config(train, conversions=True), [*(override or []), *folder_of_run])
        if folder is not None:
            check_run(recipe, folder, resume, load=load_conversion, stages=STAGES)
    elif ranks and text is None:
        raise ValueError("ranking the layers needs a text: name one with --text")
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
    from deltazoo.swap.plan import parse_layers
    from deltazoo.training.conversion import check_row_lengths, save_swapped
    from deltazoo.training.layer_ranking import check_best, rank_layers, ranking_rows
    from deltazoo.training.loading import load_checkpoint, load_model
    from deltazoo.training.pictures import draw_ranking

    if best is None:
        try:
            parse_layers(layers)
        except ValueError as error:
            raise ValueError(
                f"--layers takes all, numbers such as 0,2,5, a ratio such as 3:1, or best:K, got {layers!r}"
            ) from error
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
        console.print(ranking_table(ranking))
        if folder is not None:
            ranking.save(folder / "ranking.json")
            picture = folder / "ranking.png"
            console.print(facts_table({"picture": _drawn(lambda: draw_ranking(picture, ranking, named))}))
    if rank:
        return

    report = swap_attention(model, rule, layers=chosen, dry_run=dry_run, keep_teacher=bool(recipe), **options)
    console.print(report)
    if dry_run and recipe is not None:
        console.print(_stages_table(recipe))
    if dry_run or folder is None or tokenizer is None:
        return
    if recipe is None:
        facts = {"model": str(save_swapped(model, tokenizer, folder))}
    else:
        title = f"{rule} in {len(report.layers)} of {report.num_layers} attention slots of {path}"
        facts = _convert(model, tokenizer, recipe, folder, title, resume=resume)
    console.print(facts_table({**facts, "next": f'deltazoo generate {facts["model"]} --prompt "def "'}))


def _convert(
    model: Any, tokenizer: Any, recipe: ConversionConfig, folder: Path, title: str, *, resume: bool
) -> dict[str, str]:
    """Train the swapped model, and print and draw its scores; returns where the model and the picture are."""
    from deltazoo.training.conversion import convert
    from deltazoo.training.pictures import draw_conversion

    try:
        result = convert(model, tokenizer, recipe, resume=resume)
    except KeyboardInterrupt as stop:
        saved = has_saved(folder, STAGES)
        say("stopped; the same command with --resume goes on" if saved else "stopped before anything was saved")
        raise typer.Exit(128 + getattr(stop, "signal", 2)) from stop
    Console().print(_conversion_table(result))
    histories = {name: stage.history for name, stage in result.stages.items()}
    picture = _drawn(lambda: draw_conversion(folder / LOSS_PICTURE, histories, result.scores, title))
    return {"model": str(result.model_path), "loss curves": picture}


def facts_table(facts: dict[str, str]) -> Table:
    """Names and values in two columns."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(value))  # brackets are no markup
    return table


def figures_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Rows of a name and figures."""
    table = Table(headings[0], title=title)
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def ranking_table(ranking: "Ranking") -> Table:
    """The layers, the smallest rise in loss first."""
    rows = [(str(score.layer), f"{score.loss:.4f}", f"{score.rise:+.4f}") for score in ranking.ordered]
    title = f"one layer swapped for {ranking.rule} after transfer, {ranking.tokens:,} tokens"
    return figures_table(title, ("layer", "loss, nats per token", "rise"), [*rows, ("none", f"{ranking.loss:.4f}", "")])


def _stages_table(recipe: ConversionConfig) -> Table:
    """The stages of a conversion before it is run."""
    rows = [
        (s.section, s.trains, f"{s.steps:,}", f"{s.steps * s.rows_of_a_step * s.row_length:,}", f"{s.learning_rate:g}")
        for s in recipe.stages
    ]
    headings = ("stage", "trains", "steps", "tokens", "learning rate")
    return figures_table(f"training that would follow, on {recipe.data.text}", headings, rows)


def _conversion_table(result: "ConversionResult") -> Table:
    """Held-out bits per byte after each stage."""
    names = {"original": "original", "transfer": "swapped, weights transferred"}
    gap = result.scores["transfer"] - result.scores["original"]
    rows = []
    for name, bits in result.scores.items():
        stage: Any = result.stages.get(name)
        recovered = f"{(result.scores['transfer'] - bits) / gap:.1%}" if stage and gap > 0 else ""
        rows.append((names.get(name, f"after {name}"), f"{bits:.3f}", recovered, f"{stage.tokens:,}" if stage else ""))
    return figures_table("conversion", ("", "held-out bits per byte", "gap recovered", "tokens"), rows)
