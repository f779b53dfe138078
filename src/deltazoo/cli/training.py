"""``deltazoo train``, a run from a preset or a YAML file, and the commands that measure models."""

import importlib.util
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deltazoo.cli.options import (
    CheckpointArgument,
    DeviceOption,
    HeldOutTextOption,
    JsonOption,
    LoadOption,
    OverrideOption,
    TextFieldOption,
    as_overrides,
    check_output_file,
    figures_table,
    print_facts,
    refuse,
    where_drawn,
    with_loads,
)
from deltazoo.training.config import DataConfig, RunConfig, load_config
from deltazoo.training.console import say
from deltazoo.training.data import choose_documents, open_text
from deltazoo.training.folder import LOSS_PICTURE, best_checkpoint, check_run, checkpoints, write_json
from deltazoo.training.loading import find_config, is_for_gpus, rule_overrides

if TYPE_CHECKING:  # imports torch, which waits until the arguments are checked
    from deltazoo.training.run import TrainingResult

_FEW_PASSES = 3.0  # passes over a text after which a model begins to memorise it
_SHORT = 10_000  # bytes of text below which the compressors' own formats count
_RISE = 0.01  # nats per token by which a held-out loss must rise to be mentioned


def train(
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
) -> None:
    """Train a model, save it with its tokenizer, and draw its loss curve.

    Ctrl-C saves a checkpoint before it stops. On several GPUs: torchrun --nproc-per-node 8 -m deltazoo train ...
    """
    run = configuration(config, rule, text, output, list(override or []))
    folder = Path(run.output)
    check_run(run, resume)
    started = os.environ.get("WORLD_SIZE")  # set by torchrun and accelerate launch
    run.training.divided(int(started or 1))
    if started is None and config is not None and is_for_gpus(config):
        import torch

        if not torch.cuda.is_available():
            say(f"{config} is a preset for GPUs, and there is none here: it may take very long, or run out of memory")

    from accelerate import PartialState
    from torch import distributed

    from deltazoo.training import train as train_run

    try:
        result = train_run(run, resume=resume)
    except KeyboardInterrupt as stop:
        if PartialState().is_main_process:
            go_on = with_loads(["deltazoo", "train", run.output, "--resume"], load)
            if started is not None:
                go_on = f"torchrun --nproc-per-node {started} -m {go_on}"
            saved = checkpoints(folder)
            say(f"stopped; saved in {saved[-1]}. To go on: {go_on}" if saved else "stopped before anything was saved")
        raise typer.Exit(128 + getattr(stop, "signal", 2)) from stop
    is_main_process = PartialState().is_main_process
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()  # threads of the group can abort the process at exit
    if is_main_process:
        _report(run, result, load)


def configuration(
    name: str | None, rule: str | None, text: str | None, output: str | None, overrides: list[str]
) -> RunConfig:
    """The configuration of a run, checked as far as possible without torch.

    Raises:
        ValueError: neither a configuration nor a text is given, or it does not exist.
    """
    if name is None and text is None:
        raise ValueError("name a configuration, or a text with --text; deltazoo train --help has examples")
    given = as_overrides({"--rule model.mixer": rule, "--text data.text": text, "--output output": output}, overrides)
    defaults = []
    if text is not None:  # subset, split and streaming of a data set do not fit another text
        defaults += [f"data.{key}={json.dumps(getattr(DataConfig, key))}" for key in ("subset", "split", "streaming")]
    if name is not None and Path(name).is_dir():
        defaults += as_overrides({"--output output": name})
    elif name is None and text is not None:
        defaults += as_overrides({"--output output": f"runs/{Path(os.path.abspath(text)).stem or 'text'}"})  # also "."
    if name is None:
        open_text(DataConfig(text=str(text)))  # before torch is asked for a GPU
        import torch

        name = "quickstart_gpu" if torch.cuda.is_available() else "quickstart_cpu"
    path = find_config(name)
    run = load_config(path, [*(rule_overrides(path, rule) if rule else []), *defaults, *given, *overrides])
    open_text(run.data)
    return run


def _report(run: RunConfig, result: "TrainingResult", load: list[Path] | None) -> None:
    """Print the results of a finished run, and the commands to continue with."""
    from deltazoo.diagnosis.pictures import draw_loss_curve

    folder = Path(run.output)
    if result.finished_before:
        more = with_loads(["deltazoo", "train", run.output, "--resume"], load)
        say(
            f"{folder} is finished already, with {run.training.steps:,} steps, and nothing was trained. "
            f"To go on: {more} --set training.steps={2 * run.training.steps}"
        )
    title = f"{run.model_name}, {result.num_parameters / 1e6:.1f} M parameters, {result.corpus.description}"
    drawn = where_drawn(
        lambda: draw_loss_curve(result.log_history, folder / LOSS_PICTURE, title, result.tokens_per_step)
    )
    last = [entry for entry in result.log_history if "eval_loss" in entry][-1]
    read = "as a stream" if result.passes is None else f"read {result.passes:,.1f} times"
    print_facts(
        {
            "model": str(result.model_path),
            "parameters": f"{result.num_parameters:,}",
            "text": f"{result.corpus.description}, {read}",
            "device": f"{result.device}, {result.precision}",
            "training": f"{result.seconds:,.0f} s, {result.tokens_per_second:,.0f} tokens/s",
            "held-out loss": f"{last['eval_loss']:.3f} nats per token, {last['eval_bits_per_byte']:.3f} bits per byte",
            "loss curve": drawn,
            "next": with_loads(["deltazoo", "eval", run.output], load),
            "": with_loads(["deltazoo", "generate", run.output, "--prompt", _prompt(result)], load),
        }
    )
    if remark := _remark(result, folder):
        say(remark)


def _prompt(result: "TrainingResult") -> str:
    """The beginning of a line of the held-out text, which a shell takes unchanged when quoted."""
    lines = (line.strip() for text in result.corpus.validation for line in text.splitlines())
    line = next(filter(str.isprintable, filter(None, lines)), "The")
    return line if len(line) <= 24 else line[:24].rpartition(" ")[0] or line[:24]


def _remark(result: "TrainingResult", folder: Path) -> str | None:
    """A sentence about a model that has begun to memorise its text; None about any other."""
    losses = {entry["step"]: entry["eval_loss"] for entry in result.log_history if "eval_loss" in entry}
    best, last = min(losses, key=lambda step: losses[step]), max(losses)
    risen = losses[last] > losses[best] + _RISE
    often = result.passes is not None and result.passes > _FEW_PASSES
    read = f"the training text was read {result.passes:,.0f} times" if often else ""
    if not risen:
        return f"{read[0].upper()}{read[1:]}: more text, or fewer steps, would do better" if read else None
    kept = best_checkpoint(folder, result.log_history)
    return (
        f"The held-out loss has risen since step {best} (from {losses[best]:.3f} to {losses[last]:.3f})"
        f"{f', and {read}' if read else ''}: more text, or --set training.steps={best}, would do better"
        f"{'' if kept is None or kept.name == f'checkpoint-{last}' else f'; the best model that was kept is {kept}'}"
    )


def evaluate(
    path: CheckpointArgument,
    text: HeldOutTextOption = None,
    text_field: TextFieldOption = "text",
    max_bytes: Annotated[int | None, typer.Option(min=1, help="Stop reading --text after this many bytes.")] = None,
    primed: Annotated[bool, typer.Option(help="Also measure xz with the training text read before.")] = False,
    json_file: JsonOption = None,
    load: LoadOption = None,
    device: DeviceOption = None,
) -> None:
    """Score a model on held-out text, and compare it with gzip and xz."""
    without_text = max_bytes is not None or text_field != DataConfig.text_field
    refuse({"--max-bytes and --text-field act on --text only": text is None and without_text})
    texts = choose_documents(path, text, text_field, max_bytes)

    from deltazoo.training.evaluate import Baseline, baselines, score_documents
    from deltazoo.training.loading import load_checkpoint

    model, tokenizer = load_checkpoint(path, device)
    score = score_documents(model, tokenizer, texts.validation)
    others = baselines(texts.train, texts.validation, primed=primed)
    rule = getattr(model.config, "mixer", model.config.model_type)
    ours = Baseline(f"{rule}, {model.num_parameters() / 1e6:.1f} M", score.bits_per_byte, "the training text")
    ranked = sorted([ours, *others], key=lambda row: row.bits_per_byte)
    rows = [(f"> {row.name}" if row is ours else row.name, f"{row.bits_per_byte:.3f}", row.has_seen) for row in ranked]
    title = f"documents scored: {score.documents}, {score.bytes:,} bytes"
    console = Console()
    console.print(figures_table(title, ("predictor", "bits per byte", "has seen before"), rows))
    facts = {
        "text": texts.description,
        "perplexity": f"{score.perplexity:.2f} per token of this tokenizer ({len(tokenizer)} entries)",
        "speed": f"{score.tokens_per_second:,.0f} tokens/s",
    }
    print_facts(facts)
    if score.bytes < _SHORT:
        say(
            f"{score.bytes:,} bytes are too few for a comparison: gzip's format takes some 20 bytes of a file, xz's "
            f"60, and the score of one short text is chance. Give {_SHORT:,} bytes or more"
        )
    if json_file:
        figures = {
            "model": path,
            "text": texts.description,
            "bits_per_byte": score.bits_per_byte,
            "perplexity": score.perplexity,
            "score": asdict(score),
            "baselines": [asdict(baseline) for baseline in others],
        }
        write_json(Path(json_file), figures)


def diagnose(
    path: CheckpointArgument,
    text: HeldOutTextOption = None,
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
    picture: Annotated[
        str | None,
        typer.Option(help="Also draw heat maps of all heads into this PNG.", callback=check_output_file),
    ] = None,
    json_file: JsonOption = None,
    load: LoadOption = None,
    device: DeviceOption = None,
) -> None:
    """Erase gains, half-lives of decays, norms of states and saturated gates of every layer; warnings in sentences."""
    refuse({"--text-field acts on --text only": text is None and text_field != DataConfig.text_field})
    if picture is not None:
        if Path(picture).suffix.lower() != ".png":
            raise ValueError(f"--picture writes a PNG: give a name that ends in .png, not {picture}")
        from deltazoo.diagnosis.pictures import require_matplotlib

        require_matplotlib()
    texts = choose_documents(path, text, text_field, max_bytes=None if text is None else 64 * tokens)

    from deltazoo.diagnosis import diagnose as measure_layers
    from deltazoo.generation.conditions import check_positions, learned_positions
    from deltazoo.training.loading import load_checkpoint
    from deltazoo.training.tokens import text_batch

    model, tokenizer = load_checkpoint(path, device)
    if length is None:
        length = min(2048, learned_positions(model) or 2048)
    check_positions(model, length, f"documents of --length {length}")
    found = measure_layers(model, text_batch(tokenizer, texts.validation, length, tokens))
    typer.echo(f"{texts.description}\n{found}")
    if picture is not None:
        found.save_picture(picture)
    if json_file is not None:
        write_json(Path(json_file), found.records())
    if found.not_finite is not None:
        raise typer.Exit(1)


def lm_eval(
    arguments: Annotated[list[str], typer.Argument(help="Those of lm_eval, as they are.", metavar="ARGUMENTS")],
    load: LoadOption = None,
) -> None:
    """Run lm-evaluation-harness with our models, swapped ones and, as --model deltazoo, accelerated ones."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError(
            "lm-evaluation-harness is not installed: pip install '.[harness]' in a checkout of deltazoo, or elsewhere "
            "pip install lm_eval"
        )

    from deltazoo.training.evaluate import run_harness

    run_harness(arguments)
