"""``deltazoo train CONFIG.yaml``: one training run."""

from typing import Annotated

import typer
from rich.console import Console

_EXAMPLE = (
    "Examples: [bold]deltazoo train configs/quickstart_cpu.yaml[/], "
    "[bold]deltazoo train quickstart_gpu --set data.text=my_texts --output runs/mine[/]"
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("train", epilog=_EXAMPLE)(train_model)


def train_model(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a preset (see deltazoo show).")],
    resume: Annotated[bool, typer.Option(help="Go on from the latest checkpoint of the run.")] = False,
    output: Annotated[str | None, typer.Option(help="Folder of the run, in place of the configuration's.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; replaces one value; may be repeated.")
    ] = None,
) -> None:
    """Train a model, save it with its tokenizer, and draw its loss curve."""
    from pathlib import Path

    from accelerate import PartialState
    from torch import distributed

    from deltazoo.cli.presets import find_config
    from deltazoo.cli.render import facts_table
    from deltazoo.evaluation.loss_curve import draw_loss_curve
    from deltazoo.training import load_config, train

    overrides = list(override or []) + ([f"output={output}"] if output else [])
    run = load_config(find_config(config), overrides)
    result = train(run, resume=resume)
    is_main_process = PartialState().is_main_process
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()  # its threads, if they outlive it, can abort the process as it exits
    if not is_main_process:
        return
    title = f"{run.model['mixer']}, {result.num_parameters / 1e6:.1f} M parameters, {result.corpus.description}"
    picture = draw_loss_curve(result.log_history, Path(run.output) / "loss.png", title, result.tokens_per_step)
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
