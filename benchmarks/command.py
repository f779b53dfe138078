"""`deltazoo bench`: the command line of the benchmarks and of the self-check."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.arguments import choices
from benchmarks.model_command import model
from benchmarks.operator_options import GATE_KINDS, GROUPS, OPERATORS, OPS, PEERS, parse_peers
from benchmarks.shapes import parse_shapes
from deltazoo.training.device import check_device

__all__ = ["app"]

_BACKENDS = ("triton", "chunkwise")
_CPU_GROUPS = ("forward", "training", "host")
_CPU_SHAPES = "1x512x4x64x64,1x2048x4x64x64"

app = typer.Typer(
    name="bench",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True, epilog="Example: [bold]deltazoo bench --check[/]")
def main(
    context: typer.Context,
    check: Annotated[bool, typer.Option("--check", help="Compare the kernels with float64 on small inputs.")] = False,
    backend: Annotated[str, typer.Option(help="Backend to check: triton or chunkwise.")] = "triton",
    device: Annotated[str, typer.Option(help="Device to check it on.")] = "cuda",
    jobs: Annotated[int, typer.Option(min=0, help="Processes at a time; 0: all in this one.")] = 8,
) -> None:
    """Time operators (`bench ops`) or models (`bench model`), or check the kernels on this machine (`bench --check`).

    The check compares outputs and every gradient with float64, on easy and hard inputs, in about a minute; exit status
    1 if anything is off.
    """
    if context.invoked_subcommand is not None:
        if check:
            raise ValueError("--check stands alone: run `deltazoo bench --check`")
        return
    if not check:
        raise ValueError("nothing to do: use --check or a subcommand; see --help")
    [name] = choices(backend, _BACKENDS, "backend")
    check_device(device)

    import torch

    from deltazoo.checks.kernel_check import Verdict, run_selfcheck
    from deltazoo.ops import resolve_backend

    try:
        resolve_backend(name, device=device, dtype=torch.bfloat16, head_k_dim=128, head_v_dim=128)
    except RuntimeError as error:
        raise ValueError(str(error)) from error

    def report(verdict: Verdict) -> None:
        outcome = "ok  " if verdict.passed else "FAIL"
        detail = verdict.message or f"{verdict.error:.1e} of {verdict.tolerance:.1e} in {verdict.tensor}"
        typer.echo(f"{outcome} {verdict.case:<78} {detail}")

    verdicts = run_selfcheck(backend=backend, device=device, jobs=jobs, report=report)
    failed = sum(not verdict.passed for verdict in verdicts)
    typer.echo(f"{len(verdicts) - failed} of {len(verdicts)} cases right")
    if failed:
        raise typer.Exit(1)


@app.command(
    epilog="Example: [bold]deltazoo bench ops --shapes train,small --ops delta,gdn --peers sdpa --out run.json[/]"
)
def ops(
    out: Annotated[Path, typer.Option(help="JSON result file; rows of an existing one are kept or replaced.")],
    shapes: Annotated[
        str | None,
        typer.Option(
            help="train, long, small, narrow, wide, grouped, table (default on a GPU), sweep, BxTxHxKxV or "
            "BxTxH/HVxKxV; two small ones by default on a CPU."
        ),
    ] = None,
    operators: Annotated[str, typer.Option("--ops", help=f"Out of {','.join(OPERATORS)},softmax.")] = ",".join(OPS),
    gates: Annotated[str, typer.Option(help=f"Out of {','.join(GATE_KINDS)}.")] = "weak,medium,strong",
    peers: Annotated[str, typer.Option(help=f"Out of {','.join(PEERS)}, or none.")] = "fla,sdpa",
    measure: Annotated[
        str,
        typer.Option(
            help="Out of forward,training,graphs,memory,host,cold,decode; graphs, memory, cold and decode need a GPU."
        ),
    ] = "forward,training,graphs,memory,host,cold,decode",
    precision: Annotated[str, typer.Option(help="Out of default,fast,strict: one row each.")] = "default",
    ours: Annotated[bool, typer.Option(help="Time deltazoo itself.")] = True,
    backend: Annotated[
        str | None, typer.Option(help="Our backend: triton (default on a GPU) or chunkwise (on a CPU).")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run: cuda or cpu.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record; read from git unless given.")] = None,
    warm_up_jobs: Annotated[
        int, typer.Option(min=0, help="Compile for self-tuning peers in so many processes first.")
    ] = 0,
    warm_up_only: Annotated[bool, typer.Option(help="Fill compile caches: first calls only, nothing saved.")] = False,
    resume: Annotated[bool, typer.Option(help="Leave out what has rows in --out already, failures too.")] = False,
) -> None:
    """Time the operators side by side with peers and write a JSON result file.

    A GPU lost to a faulty kernel costs that measurement only: the run goes on in a new process. Exit status 1 if any
    measurement failed.
    """
    check_device(device)
    precisions = choices(precision, ("default", "fast", "strict"), "precision")
    groups, named_peers = choices(measure, GROUPS, "measure"), parse_peers(peers)
    on_cpu = device == "cpu"
    if on_cpu:
        groups, named_peers = _possible_on_a_cpu(groups, named_peers, backend)
    chosen: dict[str, Any] = {
        "shapes": parse_shapes(shapes or (_CPU_SHAPES if on_cpu else "table")),
        "ops": choices(operators, (*OPERATORS, "softmax"), "operator"),
        "gates": choices(gates, GATE_KINDS, "gate strength"),
        "groups": groups,
        "peers": named_peers,
        "precisions": [None if name == "default" else name for name in precisions],
        "backend": choices(backend or ("chunkwise" if on_cpu else "triton"), _BACKENDS, "backend")[0],
    }

    from benchmarks.operator_candidates import installed_peers
    from benchmarks.operator_suite import DeviceLost, Plan, bench_ops
    from benchmarks.warm_up import warm_up_commands, warm_up_peers

    try:
        plan = Plan(**chosen, ours=ours, device=device, warm_up_only=warm_up_only)
        if warm_up_jobs and not resume:
            commands = warm_up_commands(plan.shapes, plan.ops, installed_peers(plan.peers)[0], device)
            warm_up_peers(commands, warm_up_jobs, report=typer.echo)
        results = bench_ops(plan, out, commit=commit, command=sys.argv[1:], resume=resume, report=typer.echo)
    except DeviceLost as error:
        typer.echo(f"{error}; going on in a new process", err=True)
        sys.stdout.flush()
        os.execv(sys.executable, [*sys.orig_argv, *([] if resume else ["--resume"])])
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    failed = [row for row in results.rows.values() if row.error is not None]
    typer.echo(f"{len(results.rows)} rows, {len(failed)} of them failures" + ("" if warm_up_only else f", in {out}"))
    # With --resume this run continues an earlier one, so failures of that one count too.
    if failed if resume else any(row.run == list(results.runs)[-1] for row in failed):
        raise typer.Exit(1)


def _possible_on_a_cpu(groups: list[str], peers: list[str], backend: str | None) -> tuple[list[str], list[str]]:
    """The measures and peers that a CPU can run; prints what is left out.

    Raises:
        ValueError: nothing is left, or the backend cannot run there.
    """
    if backend == "triton":
        raise ValueError("--backend triton needs a GPU: leave it out, or say --backend chunkwise")
    measures = [name for name in groups if name in _CPU_GROUPS]
    if not measures:
        raise ValueError(f"--measure {','.join(groups)} needs a GPU; on a CPU: {', '.join(_CPU_GROUPS)}")
    others = [name for name in peers if not name.startswith("fla")]
    left_out = [name for name in [*groups, *peers] if name not in measures and name not in others]
    if left_out:
        typer.echo(f"not measured on a CPU: {', '.join(left_out)}")
    return measures, others


app.command(
    name="model",
    epilog="Example: [bold]deltazoo bench model --device cpu --threads 2 --out run.json[/]",
)(model)
