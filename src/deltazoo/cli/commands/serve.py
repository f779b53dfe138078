"""``deltazoo serve PATH``: a model behind OpenAI's HTTP API."""

from typing import Annotated

import typer

from deltazoo.cli.options import CheckpointArgument, DeviceOption
from deltazoo.cli.rule_files import LoadOption

_DTYPES = ("float32", "bfloat16", "float16")
_EXAMPLE = "Example: [bold]deltazoo serve runs/quickstart --port 8000[/]"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("serve", epilog=_EXAMPLE)(serve)


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
    import ipaddress
    import re
    from pathlib import Path

    from deltazoo.names import unknown
    from deltazoo.training.checkpoint_path import resolve_checkpoint
    from deltazoo.training.console import say

    if dtype not in (None, *_DTYPES):
        raise ValueError(unknown("dtype", dtype, _DTYPES))
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", widths):
        raise ValueError(f"--widths takes numbers from 1 on, such as 1,8,64, got {widths!r}")
    rows = sorted({int(width) for width in widths.split(",")})
    folder = Path(resolve_checkpoint(path))
    name = name or (folder.parent.name if folder.name == "model" else folder.name)

    try:
        from deltazoo.serving.http_processes import AppSettings, number_of_processes, run_server
        from deltazoo.serving.http_server import bind, url_of
    except ModuleNotFoundError as error:
        raise ImportError(f"deltazoo serve needs {error.name}: pip install 'deltazoo[serve]'") from error

    addresses = bind(host, port, number_of_processes())
    url = url_of(addresses[0])
    import torch

    from deltazoo.serving.engine import Engine
    from deltazoo.serving.model_limits import unlimited
    from deltazoo.serving.model_loading import load_for_serving
    from deltazoo.training.console import console

    with console.status(f"loading {path}"):
        model, tokenizer = load_for_serving(str(folder), device, None if dtype is None else getattr(torch, dtype))
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
    if api_key is None and not ipaddress.ip_address(addresses[0].getsockname()[0]).is_loopback:
        say("Without --api-key everyone who reaches this machine can use the server.")

    def ready() -> None:
        header = "" if api_key is None else ' -H "Authorization: Bearer $DELTAZOO_API_KEY"'
        typer.echo(f"{name} at {url}/v1, for example:")
        typer.echo(
            f"curl {url}/v1/completions{header} -H 'Content-Type: application/json' "
            f'-d \'{{"model": "{name}", "prompt": "def read(self", "max_tokens": 64}}\''
        )

    settings = AppSettings(tokenizer, max_queue, name, api_key)
    run_server(engine, settings, addresses, stop_timeout=stop_timeout, ready=ready)
