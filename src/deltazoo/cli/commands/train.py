"""``deltazoo train``: a training run from a preset or a YAML file, on the user's own text if one is given."""

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deltazoo.cli.rule_files import LoadOption

if TYPE_CHECKING:
    from deltazoo.training import RunConfig, TrainingResult

_EXAMPLE = (
    "Examples: [bold]deltazoo train --text my_texts[/] (a file or folder; the run goes to runs/my_texts), "
    "[bold]deltazoo train kda_340m --set training.steps=1000 --output runs/mine[/], "
    "[bold]deltazoo train runs/mine --resume --set training.steps=2000[/], "
    "[bold]deltazoo train kda_340m --gpus 8[/] (eight GPUs; torchrun and accelerate launch work too)"
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("train", epilog=_EXAMPLE)(train_model)


def train_model(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, the name of a preset (see deltazoo show), or the folder of a run. "
            "With --text, the quickstart of this machine unless given."
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
    override: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; replaces one value; may be repeated.")
    ] = None,
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
    from deltazoo.cli.several_processes import number_of_processes, run_in_processes
    from deltazoo.training.division import divide_rows
    from deltazoo.training.run_folder import check_run

    overrides = list(override or [])
    if context_parallel is not None:
        overrides.append(f"training.context_parallel={context_parallel}")
    run = _configuration(config, text, output, overrides)
    check_run(run, Path(run.output), resume)
    started = number_of_processes()
    if gpus is not None and started not in (None, gpus):
        raise ValueError(f"--gpus {gpus}: the command runs in {started} processes already; leave --gpus out")
    divide_rows(run.training, started or gpus or 1)
    if started is None and config is not None:
        _say_if_gpu_is_missing(config)
    if started is None and gpus is not None and gpus > 1:
        options: list[tuple[str, str | None]] = [("--text", text), ("--output", output)]
        options += [("--set", each) for each in overrides]
        options += [("--load", str(path)) for path in load or []]
        given = [word for name, value in options if value is not None for word in (name, value)]
        positional = [] if config is None else [config]
        run_in_processes(gpus, ["train", *positional, *given, *(["--resume"] if resume else [])])

    from accelerate import PartialState
    from torch import distributed

    from deltazoo.training import train

    try:
        result = train(run, resume=resume)
    except KeyboardInterrupt as stop:
        if PartialState().is_main_process:
            _say_how_to_go_on(Path(run.output))
        raise typer.Exit(128 + getattr(stop, "signal", 2)) from stop
    is_main_process = PartialState().is_main_process
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()  # its threads can abort the process at exit
    if is_main_process:
        _show(run, result)


def _configuration(name: str | None, text: str | None, output: str | None, overrides: list[str]) -> "RunConfig":
    """The configuration, checked as far as possible without torch.

    Raises:
        ValueError: neither a configuration nor a text is given, or it does not exist.
    """
    from deltazoo.training.config import DataConfig, load_config
    from deltazoo.training.presets import find_config
    from deltazoo.training.text import open_text

    if name is None and text is None:
        raise ValueError("name a configuration, or a text with --text; deltazoo train --help has examples")
    for option, key, given in (("--text", "data.text", text), ("--output", "output", output)):
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
        name = _quickstart()
    run = load_config(find_config(name), overrides)
    open_text(run.data)
    return run


def _quickstart() -> str:
    import torch

    return "quickstart_gpu" if torch.cuda.is_available() else "quickstart_cpu"


def _say_if_gpu_is_missing(name: str) -> None:
    from deltazoo.training.console import say
    from deltazoo.training.presets import is_for_gpus

    if is_for_gpus(name):
        import torch

        if not torch.cuda.is_available():
            say(f"{name} is a preset for GPUs, and there is none here: it may take very long, or run out of memory")


def _say_how_to_go_on(folder: Path) -> None:
    from deltazoo.training.checkpoint_files import checkpoints
    from deltazoo.training.console import say

    saved = checkpoints(folder)
    if saved:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpus = "" if processes == 1 else f" --gpus {processes}"
        say(f"stopped; saved in {saved[-1]}. To go on: deltazoo train {shlex.quote(str(folder))} --resume{gpus}")
    else:
        say("stopped before anything was saved")


def _show(run: "RunConfig", result: "TrainingResult") -> None:
    from deltazoo.cli.tables import facts_table
    from deltazoo.training.loss_curve import draw_loss_curve
    from deltazoo.training.run_folder import LOSS_PICTURE

    title = f"{run.model_name}, {result.num_parameters / 1e6:.1f} M parameters, {result.corpus.description}"
    picture = draw_loss_curve(result.log_history, Path(run.output) / LOSS_PICTURE, title, result.tokens_per_step)
    last = [entry for entry in result.log_history if "eval_loss" in entry][-1]
    facts = {
        "model": str(result.model_path),
        "parameters": f"{result.num_parameters:,}",
        "device": f"{result.device}, {result.precision}",
        "training": f"{result.seconds:,.0f} s, {result.tokens_per_second:,.0f} tokens/s",
        "held-out loss": f"{last['eval_loss']:.3f} nats per token, {last['eval_bits_per_byte']:.3f} bits per byte",
        "loss curve": str(picture),
        "next": f"deltazoo eval {run.output}",
        "": f'deltazoo generate {run.output} --prompt "def "',
    }
    Console().print(facts_table(facts))
