"""Errors of both implementations of the Triton backend, and of plain torch, on hard inputs. Needs a GPU.

    python scripts/measure_numerics.py --out benchmarks/results/numerics_h200.json --commit $(git rev-parse HEAD)

Errors are relative, in the root-mean-square sense, of output, final state and every gradient, and of output and final
state of a call that records no gradients, against the chunk form in float64 on the same rounded inputs.

`default` is the backend as it runs: Gluon kernels where they serve the call, plain Triton kernels elsewhere. `plain`
has the plain kernels only, and is left out where the default launched no Gluon kernel. `torch` is the chunk form in
torch whose products round their operands to the dtype of the inputs. Step sizes are at most 2 / |k|^2 of the rounded
key.

One process per decay, dtype and part of the cases, since compiling takes most of the time. Without a GPU, with
TRITON_INTERPRET=1, `--device cpu --small` runs the same on sizes that an interpreter can take.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.provenance import describe_run
from benchmarks.result_files import one_line, write_results
from deltazoo.checks.errors import plain_torch, relative_errors
from deltazoo.checks.kernel_check import DTYPES, Case, case_inputs, case_results
from deltazoo.layers import bounded_step
from deltazoo.ops import delta_rule
from deltazoo.ops.triton import delta_rule_operator, pipeline

DECAYS = ("none", "scalar", "channel")
APART = ("packed rows", "4 value heads per key head", "few heads, long rows")
"""Cases whose kernels the others do not share."""
SMALL: dict[str, Any] = dict(K=16, V=16, B=1, T=70, H=2, HV=2)


def cases(decay: str, small: bool) -> dict[str, Case]:
    """The inputs by name: 8 rows of 1,000 tokens and 16 heads of 128 unless the name says otherwise."""
    base = Case(decay, 128, 128, B=8, T=1000, H=16, HV=16, initial_state=True, mean_log_decay=-0.05)
    base = replace(base, **SMALL) if small else base
    weak, H, T = replace(base, mean_log_decay=-1e-3), base.H, base.T
    found = {
        "random": base,
        "all forgotten at one token": base,  # log-decay -inf there
        "step sizes 1e-4": replace(base, beta=1e-4),
        "step sizes 1": replace(base, beta=1.0),
        "step sizes 2": replace(base, beta=2.0),
        "one key, step sizes 1": replace(weak, keys="repeated", beta=1.0),
        "one key, step sizes 2": replace(weak, keys="repeated", beta=2.0),
        "two keys in turn, step sizes 1.9": replace(weak, keys="alternating", beta=1.9),
        "decay of 1": replace(base, mean_log_decay=0.0),
        "log-decay -5": replace(base, mean_log_decay=-5.0),
        "77 tokens": replace(base, T=base.T if small else 77),
        "packed rows": replace(base, B=1, T=2 * T, lengths=(T // 3, 0, 1, 2 * T - T // 3 - 1)),
        "4 value heads per key head": replace(base, H=max(H // 4, 1), HV=4 * max(H // 4, 1)),
        "few heads, long rows": replace(base, B=1, T=T if small else 8192, H=2, HV=2),
    }
    if decay == "none":
        found = {name: case for name, case in found.items() if case.mean_log_decay in (-0.05, -1e-3)}
        del found["all forgotten at one token"]
    return found


def inputs_of(name: str, case: Case, device: str) -> tuple[dict[str, Tensor | None], Tensor | None, Tensor, Tensor]:
    """As `case_inputs`, with bounded step sizes, and infinite decay only where the name says so."""
    inputs, cu_seqlens, d_output, d_state = case_inputs(case, device)
    k, beta, log_decay = inputs["k"], inputs["beta"], inputs["log_decay"]
    assert k is not None and beta is not None
    inputs["beta"] = bounded_step(beta, k.repeat_interleave(case.HV // case.H, 2))
    if log_decay is not None and name != "all forgotten at one token":
        inputs["log_decay"] = log_decay.clamp(min=2 * case.mean_log_decay)
    return inputs, cu_seqlens, d_output, d_state


@contextmanager
def recorded_launches() -> Iterator[list[Any]]:
    """Collects the kernels that are launched in the meantime."""
    kernels: list[Any] = []
    launch = pipeline.launch

    def recording(kernel: Any, *arguments: Any) -> None:
        kernels.append(kernel)
        launch(kernel, *arguments)

    pipeline.launch = recording  # type: ignore[assignment]
    try:
        yield kernels
    finally:
        pipeline.launch = launch


@contextmanager
def plain_kernels_only() -> Iterator[None]:
    """No Gluon kernel is available in the meantime."""
    modules = (pipeline, delta_rule_operator)
    kept = [module.available for module in modules]
    for module in modules:
        module.available = lambda device: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, available in zip(modules, kept, strict=True):
            module.available = available  # type: ignore[attr-defined]


def gluon_names(kernels: list[Any]) -> list[str]:
    """Names of the Gluon kernels among those launched, each once, in order."""
    return list(dict.fromkeys(k.__name__ for k in kernels if hasattr(k, "is_gluon") and k.is_gluon()))


def measure(name: str, case: Case, device: str) -> Iterator[dict[str, Any]]:
    """One row for each implementation: its Gluon kernels and its errors."""
    inputs, cu_seqlens, d_output, d_state = inputs_of(name, case, device)
    exact_inputs = {n: None if x is None else x.double() for n, x in inputs.items()}
    gradients = (d_output.double(), d_state.double())
    exact = case_results(exact_inputs, *gradients, backend="chunkwise", cu_seqlens=cu_seqlens)
    row = dict(case=name, decay=case.decay, dtype=case.dtype, sizes=str(case))

    def triton() -> dict[str, Any]:
        with recorded_launches() as kernels, torch.no_grad():
            output, state = delta_rule(**inputs, cu_seqlens=cu_seqlens, backend="triton")  # type: ignore[arg-type]
        forward = relative_errors({"output": output, "final_state": state}, exact, inputs)
        with recorded_launches() as more:
            found = case_results(inputs, d_output, d_state, backend="triton", cu_seqlens=cu_seqlens)
        launched = dict(gluon_forward=gluon_names(kernels), gluon_training=gluon_names(more))
        return launched | dict(forward=forward, errors=relative_errors(found, exact, inputs))

    default = triton()
    yield row | dict(implementation="default") | default
    if default["gluon_forward"] or default["gluon_training"]:
        with plain_kernels_only():
            yield row | dict(implementation="plain") | triton()
    found = plain_torch(inputs, d_output, d_state, cu_seqlens=cu_seqlens)
    yield row | dict(implementation="torch", errors=relative_errors(found, exact, inputs))


def measure_group(decay: str, dtype: str, part: str, device: str, small: bool) -> Iterator[dict[str, Any]]:
    """All rows of a decay, a dtype and a part of the cases; a case that fails gives a row with its error."""
    for name, case in cases(decay, small).items():
        if (name in APART) != (part == "apart"):
            continue
        case = replace(case, dtype=dtype)
        try:
            yield from measure(name, case, device)
        except Exception as error:  # a kernel under test may raise anything
            yield dict(case=name, decay=decay, dtype=dtype, sizes=str(case), error=one_line(error))


def main() -> int:
    """Command line; exit status 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for all rows")
    parser.add_argument("--commit", help="of what is measured; read from git unless given")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with TRITON_INTERPRET=1")
    parser.add_argument("--small", action="store_true", help="sizes for the interpreter")
    parser.add_argument("--decays", default=",".join(DECAYS), help="some of them")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="some of them")
    parser.add_argument("--jobs", type=int, default=18, help="processes at a time")
    parser.add_argument("--group", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.group:
        decay, dtype, part = options.group
        for row in measure_group(decay, dtype, part, options.device, options.small):
            print(json.dumps(row), flush=True)
        return 0
    if options.out is None:
        parser.error("--out is missing")

    def run_group(group: tuple[str, ...]) -> list[dict[str, Any]]:
        command = [sys.executable, *sys.argv, "--group", *group]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0:
            rows.append(dict(case="the rest", decay=group[0], dtype=group[1], error=f"exit status {done.returncode}"))
        return rows

    groups = list(product(options.decays.split(","), options.dtypes.split(","), ("others", "apart")))
    run = describe_run(device=options.device, commit=options.commit, command=[Path(sys.argv[0]).name, *sys.argv[1:]])
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for group, found in zip(groups, pool.map(run_group, groups), strict=True):
            rows += found
            write_results(options.out, run, rows=rows)
            print(*group, f"{len(found)} rows")
    failed = [row for row in rows if "error" in row]
    for row in failed:
        print("FAILED", row["decay"], row["dtype"], row["case"], row["error"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
