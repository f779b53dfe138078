"""`deltazoo bench model`: the command line of the whole-model benchmark."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.arguments import choices
from deltazoo.cli.rule_files import LoadOption

__all__ = ["model"]

_CPU = {"size": "quickstart", "shapes": "4x256,1x1024,1x4096", "batches": "1,8", "contexts": "256,2048,16384"}
_GPU = {
    "size": "340m",
    "shapes": "8x4096,32x1024,16x2048,4x8192,2x16384,1x32768,1x65536,1x131072",
    "batches": "1,8,64,256",
    "contexts": "1024,8192,65536,262144,1000000",
}


def model(
    out: Annotated[Path, typer.Option(help="JSON result file; rows of an existing one are kept or replaced.")],
    device: Annotated[str, typer.Option(help="Where to run.")] = "cuda",
    size: Annotated[str | None, typer.Option(help="quickstart (default on a CPU), 340m (on a GPU) or 1.3b.")] = None,
    models: Annotated[str, typer.Option(help="Our mixers, comma-separated.")] = "gated_deltanet,delta_net",
    load: LoadOption = None,
    peers: Annotated[str, typer.Option(help="Out of llama,fla,swapped,qwen3-next, or none.")] = "llama,fla",
    measure: Annotated[
        str, typer.Option(help="Out of train,memory,decode,context,profile.")
    ] = "train,decode,context,profile",
    shapes: Annotated[
        str | None, typer.Option(help="Training batches BxT, comma-separated; memory and profile: the first.")
    ] = None,
    batches: Annotated[str | None, typer.Option(help="Rows while decoding.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Context lengths.")] = None,
    training: Annotated[
        str,
        typer.Option(
            help="Ways to train, out of eager,compile,no-options,plain,fused-loss,fast,fast-recompute,"
            "recompute-elementwise,recompute-block."
        ),
    ] = "eager",
    decoding: Annotated[
        str, typer.Option(help="Ways to decode, out of generate,generate-plain,loop,loop-fast,loop-compiled.")
    ] = "generate,generate-plain,loop",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Out of float32 (default on a CPU), bfloat16 (on a GPU) and autocast (float32 weights under bfloat16 "
            "autocast)."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed training steps.")] = 10,
    new_tokens: Annotated[int, typer.Option(min=2, help="Timed tokens while decoding.")] = 100,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own default unless given.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record; read from git unless given.")] = None,
) -> None:
    """Time whole models, in training and in decoding, beside peers of the same size, and write a JSON result file."""
    import torch

    from benchmarks.model_candidates import SIZES
    from benchmarks.model_decoding import DECODING_WAYS
    from benchmarks.model_suite import GROUPS, ModelPlan, bench_models
    from benchmarks.model_training import AUTOCAST, TRAINING_WAYS
    from deltazoo.training.device import check_device

    check_device(device)
    defaults = _GPU if torch.device(device).type == "cuda" else _CPU
    default_dtype = "bfloat16" if defaults is _GPU else "float32"
    if threads is not None:
        torch.set_num_threads(threads)
    plan = ModelPlan(
        size=choices(size or defaults["size"], tuple(SIZES), "size")[0],
        mixers=[] if models == "none" else models.split(","),
        peers=[] if peers == "none" else peers.split(","),
        groups=choices(measure, GROUPS, "measure"),
        device=device,
        dtypes=choices(dtype or default_dtype, ("float32", "bfloat16", AUTOCAST), "dtype"),
        shapes=[_shape(text) for text in (shapes or defaults["shapes"]).split(",")],
        batches=_numbers(batches or defaults["batches"], "batches"),
        contexts=_numbers(contexts or defaults["contexts"], "contexts"),
        training_ways=choices(training, TRAINING_WAYS, "way to train"),
        decoding_ways=choices(decoding, DECODING_WAYS, "way to decode"),
        training_steps=steps,
        new_tokens=new_tokens,
    )
    results = bench_models(plan, out, commit=commit, command=sys.argv[1:], report=typer.echo)
    failed = [row for row in results.rows.values() if row.error is not None]
    typer.echo(f"{len(results.rows)} rows, {len(failed)} of them failures, in {out}")
    if any(row.run == list(results.runs)[-1] for row in failed):
        raise typer.Exit(1)


def _shape(text: str) -> tuple[int, int]:
    rows, _, tokens = text.partition("x")
    if not (rows.isdigit() and tokens.isdigit() and int(rows) and int(tokens)):
        raise ValueError(f"a training batch reads ROWSxTOKENS, such as 8x4096; got {text!r}")
    return int(rows), int(tokens)


def _numbers(text: str, what: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isdigit() and int(number) for number in numbers):
        raise ValueError(f"{what} must be whole numbers above 0, separated by commas; got {text!r}")
    return [int(number) for number in numbers]
