"""The ``deltazoo`` command: list, show, check, train, swap, distill, export, generate, serve, eval, diagnose, lm-eval.

Imports of torch stand inside the commands, after the checks of arguments, so that help and error messages are quick.
"""

import ipaddress
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltazoo import __version__, spec
from deltazoo.cli.options import (
    CheckpointArgument,
    DeviceOption,
    LoadOption,
    check_output_file,
    load_rule_file,
    print_facts,
    refuse,
    with_loads,
)
from deltazoo.cli.swapping import distill, export, swap
from deltazoo.cli.training import diagnose, evaluate, lm_eval, train
from deltazoo.compat.native.formats import targets_of
from deltazoo.names import unknown
from deltazoo.training.console import console as errors
from deltazoo.training.console import say
from deltazoo.training.loading import paper_shape, resolve_checkpoint

__all__ = ["app", "main"]

_HEAD_DIM = "hidden_size / num_heads"
_HEAD_DIM_OF_TYPES = {"delta_rule": _HEAD_DIM, "delta_net": _HEAD_DIM, "efla": _HEAD_DIM, "gla": f"{_HEAD_DIM} / 2"}
"""Model types whose heads divide `hidden_size`. Files of other types on the Hub leave out a `head_dim` that equals the
paper's, so the paper's is the default there."""
_BAD_INPUT = (ValueError, KeyError, OSError, NotImplementedError, ArithmeticError, ImportError)
_DTYPES = ("float32", "bfloat16", "float16")
_IN_SEVERAL_PROCESSES = ("train", "lm-eval", "list", "show")  # the last two do nothing that processes could share
_DRAWN_OTHERWISE = {"min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}
"""Options of a generation config by which only `model.generate` draws, and the value that changes nothing, as None
does."""

app = typer.Typer(
    name="deltazoo",
    help="The model zoo for delta-rule linear attention.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with status 0, 1 after bad input, or 128 + n after the signal n."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=arguments, prog_name="deltazoo", obj=arguments)
    except SystemExit as stop:
        # click exits with 2 after wrong usage; scripts get one status for all bad input.
        by_signal = isinstance(stop.code, int) and stop.code > 128
        sys.exit(stop.code if by_signal else 0 if stop.code in (0, None) else 1)
    except _BAD_INPUT as error:
        if "--traceback" in arguments:
            raise
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        if isinstance(error, OSError) and error.strerror and error.filename:  # without its number
            message = f"{error.filename}: {error.strerror}"
        errors.print(Text.assemble(("Error: ", "bold red"), str(message)), soft_wrap=True)
        sys.exit(1)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the Python traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    processes = os.environ.get("WORLD_SIZE", "1")  # set by torchrun and accelerate launch
    if int(processes) > 1 and context.invoked_subcommand not in _IN_SEVERAL_PROCESSES:
        raise ValueError(
            f"deltazoo {context.invoked_subcommand} runs in one process, and WORLD_SIZE says that this is one of "
            f"{processes}: call it without torchrun"
        )


@app.command("list", epilog="Example: [bold]deltazoo list[/]")
def list_rules(load: LoadOption = None) -> None:
    """List the rules with their step size and decay."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # in a file or a pipe no sentence is broken
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("rule", "decay", "step size", "what is special", "arXiv"):
        table.add_column(column, no_wrap=column != "what is special", overflow="fold")
    for rule in map(spec.get_rule, spec.list_rules()):
        step = spec.choice_name(rule.step_size) if rule.corrects else "no erase"
        if rule.num_micro_steps > 1:
            step = f"{rule.num_micro_steps} x {step}"
        table.add_row(rule.name, rule.decay, step, rule.summary, rule.paper.partition("arXiv:")[2] or "-")
    console.print(table)


@app.command(epilog="Example: [bold]deltazoo show gated_deltanet[/]")
def show(
    rule: Annotated[str, typer.Argument(help="Name of a rule; see deltazoo list.")],
    load: LoadOption = None,
) -> None:
    """Show a rule: equation, paper, choices, and the model that its presets train."""
    found = spec.get_rule(rule)
    if not found.corrects:
        eigenvalue = "none: it does not erase"
    elif found.erase_key == "separate":
        eigenvalue = "within [-1, 1]"
    else:  # a user's own function is bounded to the larger interval
        eigenvalue = "[-1, 1]" if found.allow_neg_eigval or callable(found.step_size) else "[0, 1]"
    no_gate = found.output_gate == "none"
    model_type = found.hub_model_type or "delta_rule"
    of_models = _HEAD_DIM_OF_TYPES.get(model_type, found.head_dim)
    mixer = "" if found.hub_model_type else f" with mixer: {found.name}"
    facts = {
        "rule": found.name,
        "in one sentence": found.summary,
        "update": found.equation,
        "paper": found.paper,
        "step size": spec.choice_name(found.step_size),
        "micro-steps": str(found.num_micro_steps),
        "decay": found.decay,
        "erase key": f"{found.erase_key}, reads the {found.erase_reads} state" if found.corrects else "none",
        "bounded without writes": f"{found.nonexpansive_class}: {spec.NONEXPANSIVE_MEANING[found.nonexpansive_class]}",
        "normalised": ", ".join(n for n, on in (("q", found.normalize_q), ("k", found.normalize_k)) if on) or "nothing",
        "eigenvalue of a step": eigenvalue,
        "output gate": "none" if no_gate else f"{found.output_gate}, {spec.choice_name(found.gate_activation)}",
        "layer": f"head_dim is {_HEAD_DIM} unless given, {found.expand_v:g} * head_dim for values",
        "model_type": f"{model_type}{mixer}; head_dim is {of_models} unless given",
        "exports to": ", ".join(targets_of(found.name)) or "no format of others",
        "at paper size": ", ".join(f"{key}: {value}" for key, value in paper_shape(found).items()),
        "trained by": with_loads(["deltazoo", "train", "paper_340m", "--rule", found.name], load),
    }
    print_facts(facts)


@app.command(
    epilog="Examples: [bold]deltazoo check my_rule.py[/], [bold]deltazoo check --report report.md[/] (this machine)"
)
def check(
    context: typer.Context,
    rule: Annotated[
        str | None,
        typer.Argument(help="Python file that registers a rule, or the name of a rule; default: check this machine."),
    ] = None,
    load: LoadOption = None,
    backend: Annotated[
        str | None, typer.Option(help="Of this machine: triton (default on a GPU) or chunkwise (on a CPU).")
    ] = None,
    device: DeviceOption = None,
    jobs: Annotated[
        int | None, typer.Option(min=0, help="Processes at a time, 8 on a GPU by default; 0: all in this one.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Also write verdicts and versions to this file, to post in an issue.",
            callback=check_output_file,
        ),
    ] = None,
) -> None:
    """Check a rule on a CPU, in under a minute: definition, gradients, cache, padding, packing, reload, swap.

    Without a rule, check this machine: every kernel against float64.
    """
    if rule is None:
        return _check_machine(backend, device, jobs, report)
    refuse({"--backend, --device, --jobs and --report act without a rule only": bool(backend or device or report)})

    if rule.endswith(".py") or Path(rule).is_file():
        names = load_rule_file(rule)
        if not names:
            raise ValueError(f"{rule} registers no rule: call deltazoo.register_rule in it; {spec.ANOTHER_FORM}")
    else:
        names = [spec.get_rule(rule).name]

    from deltazoo.checks import check_rule

    console = Console()
    failed = 0
    for name in names:
        console.print(Text(name, style="bold"))
        for finding in check_rule(name):
            wrong = finding.problem is not None
            failed += wrong
            console.print(Text.assemble(("  WRONG ", "bold red") if wrong else ("  ok    ", "green"), finding.title))
            shows_trace = finding.error is not None and context.find_root().params["traceback"]
            trace = "".join(traceback.format_exception(finding.error)) if shows_trace else None
            for words in (finding.problem, trace, finding.remark):
                if words is not None:
                    console.print(Text(words), soft_wrap=True)
    if failed:
        console.print(Text(f"{failed} {'check has' if failed == 1 else 'checks have'} found something wrong."))
        raise typer.Exit(1)
    console.print(Text("The rule keeps every promise checked here."))


def _check_machine(backend: str | None, device: str | None, jobs: int | None, report: Path | None) -> None:
    if backend not in (None, "triton", "chunkwise"):
        raise ValueError(unknown("backend", backend, ("triton", "chunkwise")))

    import torch

    from deltazoo.checks.kernel_check import machine_report, run_selfcheck
    from deltazoo.ops import resolve_backend

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device != "cpu"
    backend = backend or ("triton" if on_gpu else "chunkwise")
    resolve_backend(backend, device=device, dtype=torch.bfloat16, head_k_dim=128, head_v_dim=128)

    jobs = (8 if on_gpu else 0) if jobs is None else jobs
    verdicts = []
    for verdict in run_selfcheck(backend=backend, device=device, jobs=jobs):
        typer.echo(verdict)
        verdicts.append(verdict)
    page = machine_report(backend, device, verdicts)
    typer.echo("\n" + page)
    if report is not None:
        report.write_text(page, encoding="utf-8")
    if not all(verdict.passed for verdict in verdicts):
        raise typer.Exit(1)


app.command(
    epilog="Examples: [bold]deltazoo train --text my_texts[/] (a file or folder; the run goes to runs/my_texts), "
    "[bold]deltazoo train paper_340m --rule kda --set training.steps=1000 --output runs/mine[/], "
    "[bold]deltazoo train runs/mine --resume --set training.steps=2000[/], "
    "[bold]torchrun --nproc-per-node 8 -m deltazoo train paper_340m[/] (eight GPUs; or accelerate launch)"
)(train)
app.command(
    epilog="Examples: [bold]deltazoo swap my_llama --rule kda --layers 3:1 --dry-run[/], "
    "[bold]deltazoo swap my_llama --rule kda --rank --text my_texts --output runs/rank[/], "
    "[bold]deltazoo swap my_llama --rule kda --layers best:8 --text my_texts --output runs/kda[/]"
)(swap)
app.command(
    epilog="Examples: [bold]deltazoo distill runs/kda --original my_llama --text my_texts --output runs/distilled[/], "
    "[bold]deltazoo distill runs/kda --original my_llama --output runs/distilled --resume[/]"
)(distill)
app.command(
    "eval",
    epilog="Examples: [bold]deltazoo eval runs/quickstart[/], "
    "[bold]deltazoo eval runs/quickstart --text my_texts --json score.json[/]",
)(evaluate)
app.command(
    epilog="Examples: [bold]deltazoo diagnose runs/quickstart[/], "
    "[bold]deltazoo diagnose runs/quickstart --text my_texts --picture layers.png[/]"
)(diagnose)
app.command(
    "lm-eval",
    epilog="Example: [bold]deltazoo lm-eval --model hf --model_args pretrained=runs/quickstart/model --tasks "
    "lambada_openai[/]; what it takes: [bold]deltazoo lm-eval -- --help[/]",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(lm_eval)
app.command(
    epilog="Examples: [bold]deltazoo export runs/quickstart --to qwen3_5_text --out exported[/], "
    "[bold]deltazoo export exported --to fla --out back[/] (a checkpoint of such a type as one of ours)"
)(export)


@app.command(epilog='Example: [bold]deltazoo generate runs/quickstart --prompt "def read(self, size=-1):"[/]')
def generate(
    path: CheckpointArgument,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Upper limit of generated tokens.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from this many of the likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1.0,
            help="Sample from the likeliest tokens of this total probability; 0.95 unless given.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the prompt per forward pass; by default all.")
    ] = None,
    load: LoadOption = None,
    device: DeviceOption = None,
) -> None:
    """Continue a prompt, and print the text while it is generated."""
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise ValueError("--top-k and --top-p act on sampling, and with --temperature 0 there is none: leave them out")
    path = resolve_checkpoint(path)

    from transformers import TextStreamer, set_seed

    from deltazoo.generation import generate as continue_prompt
    from deltazoo.generation.conditions import check_positions
    from deltazoo.training.loading import load_checkpoint

    with errors.status(f"loading {path}"):
        model, tokenizer = load_checkpoint(path, device)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    if not length:
        raise ValueError(f"--prompt {prompt!r} has no tokens, and none is before it in this model: give a longer one")
    check_positions(
        model, length + max_new_tokens, f"{length} prompt tokens and --max-new-tokens {max_new_tokens} together"
    )
    draws = temperature > 0
    options: dict[str, Any] = {**inputs, "max_new_tokens": max_new_tokens}
    options["streamer"] = TextStreamer(tokenizer, skip_special_tokens=True)
    if draws:
        options |= {"temperature": temperature, "top_p": 0.95 if top_p is None else top_p, "top_k": top_k}
    ours = _runs_in_our_loop(model, draws=draws)
    began = time.perf_counter()
    if ours:
        output = continue_prompt(model, **options, seed=seed, prefill_chunk=prefill_chunk)
    else:
        set_seed(seed)
        output = model.generate(**options, do_sample=draws, prefill_chunk_size=prefill_chunk)  # type: ignore[operator]
    seconds = time.perf_counter() - began
    made = output.shape[1] - length
    errors.print(f"{made} tokens in {seconds:.1f} s: {made / seconds:.0f} tokens/s", style="dim", highlight=False)


def _runs_in_our_loop(model: Any, *, draws: bool) -> bool:
    """Whether `deltazoo.generate` can run a model, and draws by the rules of the model's generation config."""
    from deltazoo.generation import Decoder

    config = model.generation_config
    if draws and any(getattr(config, name, None) not in (None, unused) for name, unused in _DRAWN_OTHERWISE.items()):
        return False
    try:
        Decoder(model, max_length=1)
    except ValueError:
        return False
    return True


@app.command(epilog="Example: [bold]deltazoo serve runs/quickstart --port 8000[/]")
def serve(
    path: CheckpointArgument,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name for clients; default: its folder's.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="DELTAZOO_API_KEY", show_envvar=True, help="Key that clients must send."),
    ] = None,
    context_limit: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Most tokens of a prompt and its answer; default: 32,768 for our models without softmax layers, for "
            "others their max_position_embeddings.",
        ),
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; others get status 429.")] = 256,
    max_body: Annotated[
        float, typer.Option(min=0.001, help="MB of a request's body; larger ones get status 413.")
    ] = 4.0,
    widths: Annotated[
        str, typer.Option(help="Rows that a step can have; one number: equal tokens at any load, bit for bit.")
    ] = "1,2,4,8,16,32,64",
    prefix_memory: Annotated[
        float, typer.Option(min=0.0, help="GiB for states of prompts and turns that may come again.")
    ] = 1.0,
    stop_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that requests may take to finish after Ctrl-C or SIGTERM.")
    ] = 30.0,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: float32, bfloat16 or float16; default: as saved.")
    ] = None,
    load: LoadOption = None,
    device: DeviceOption = None,
) -> None:
    """Serve a model of ours, swapped, or of transformers (accelerated) over HTTP until Ctrl-C or SIGTERM."""
    if dtype not in (None, *_DTYPES):
        raise ValueError(unknown("dtype", dtype, _DTYPES))
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", widths):
        raise ValueError(f"--widths takes numbers from 1 on, such as 1,8,64, got {widths!r}")
    rows = sorted({int(width) for width in widths.split(",")})
    folder = Path(resolve_checkpoint(path))
    name = name or (folder.parent.name if folder.name == "model" else folder.name)

    try:
        from deltazoo.serving.http import bind, check_key, url_of
        from deltazoo.serving.pipe import run_server
    except ModuleNotFoundError as error:
        raise ImportError(
            f"deltazoo serve needs {error.name}: pip install '.[serve]' in a checkout of deltazoo, or elsewhere "
            "pip install fastapi uvicorn prometheus_client"
        ) from error

    if api_key is None:  # an empty variable counts as none for typer, and would let everybody in
        api_key = os.environ.get("DELTAZOO_API_KEY")
    check_key(api_key)
    address = bind(host, port)
    url, is_loopback = url_of(address), ipaddress.ip_address(address.getsockname()[0]).is_loopback
    import torch

    from deltazoo.serving.engine import Engine, unlimited
    from deltazoo.training.loading import load_checkpoint

    with errors.status(f"loading {path}"):
        model, tokenizer = load_checkpoint(str(folder), device, None if dtype is None else getattr(torch, dtype))
        if context_limit is None and unlimited(model):
            context_limit = 32_768
        engine = Engine(
            model,
            tokenizer,
            widths=rows,
            max_queue=max_queue,
            context_limit=context_limit,
            prefix_memory=int(prefix_memory * 2**30),
        )
        engine.start()
    if api_key is None and not is_loopback:
        say("Without --api-key everyone who reaches this machine can use the server.")

    def ready() -> None:
        header = "" if api_key is None else ' -H "Authorization: Bearer $DELTAZOO_API_KEY"'
        typer.echo(f"{name} at {url}/v1, for example:")
        typer.echo(
            f"curl {url}/v1/completions{header} -H 'Content-Type: application/json' "
            f'-d \'{{"model": "{name}", "prompt": "def read(self", "max_tokens": 64}}\''
        )

    options = {"model": name, "api_key": api_key, "max_body": int(max_body * 1e6)}
    run_server(engine, options, address, stop_timeout=stop_timeout, ready=ready)
