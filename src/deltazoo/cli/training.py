"""``deltazoo train``, a run from a preset or a YAML file."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from deltazoo.cli.options import LoadOption, OverrideOption, facts_table, where_drawn
from deltazoo.training.checkpoint_files import checkpoints
from deltazoo.training.config import DataConfig, RunConfig, load_config
from deltazoo.training.console import say
from deltazoo.training.presets import find_config, is_for_gpus, rule_overrides
from deltazoo.training.run_folder import LOSS_PICTURE, check_run
from deltazoo.training.text import open_text


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
        drawn = where_drawn(lambda: draw_loss_curve(result.log_history, picture, title, result.tokens_per_step))
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
