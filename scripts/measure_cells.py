"""Times and errors where tuned peers say no or go wrong: gates, dtypes, sizes and calls beyond the common ones. A GPU.

    python scripts/measure_cells.py --out benchmarks/results/cells_h200.json --commit $(git rev-parse HEAD)

Every cell is one call on 8 x 4,096 tokens with 16 heads, of Gated DeltaNet's operator unless it has no gate: time of a
forward call, of one with every gradient, peak memory, and relative errors of output, final state and gradients against
float64 on the same rounded inputs, all of one process. A library that refuses a cell leaves its own words.

flash-linear-attention tunes itself anew for every dtype and size, which takes minutes; those cells come last.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.provenance import describe_run
from benchmarks.result_files import one_line, write_results
from benchmarks.timing import Timer, timer_for
from deltazoo.checks.errors import relative_errors
from deltazoo.checks.kernel_check import Case, case_inputs
from deltazoo.ops import delta_rule

BASE = Case("scalar", 128, 128, B=8, T=4096, H=16, HV=16)
LENGTHS = (512, 4096, 1, 7391, 4384, 8192, 8192)
CELLS: dict[str, Case] = {
    "as most models": BASE,
    "negative eigenvalues, step sizes to 2": BASE,
    "weak gates, mean log-decay -0.001": replace(BASE, mean_log_decay=-1e-3),
    "strong gates, mean log-decay -1": replace(BASE, mean_log_decay=-1.0),
    "no gate": replace(BASE, decay="none"),
    "one key repeated, step size 1.9, weak gates": replace(BASE, keys="repeated", beta=1.9, mean_log_decay=-1e-3),
    "packed rows of 1 to 8,192 tokens": replace(BASE, B=1, T=sum(LENGTHS), lengths=LENGTHS),
    "initial state, gradient of the final one": replace(BASE, initial_state=True),
    "4 query and key heads, 16 value heads": replace(BASE, H=4),
    "float16": replace(BASE, dtype="float16"),
    "float32": replace(BASE, dtype="float32"),
    "64 value channels": replace(BASE, V=64),
    "256 value channels": replace(BASE, V=256),
}
RETUNED = ("4 query and key heads, 16 value heads", "float16", "float32", "64 value channels", "256 value channels")
"""Cells for which flash-linear-attention tunes itself anew."""
LIBRARIES = ("deltazoo", "flashqla", "fla-tilelang")

Call = Callable[..., tuple[Tensor, Tensor | None]]


def order(libraries: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Cells and the libraries to measure on them, what takes long last."""
    slow = [name for name in libraries if name.startswith("fla-")]
    yield from ((cell, [name for name in libraries if name not in slow]) for cell in CELLS)
    yield from ((cell, slow) for cell in CELLS if cell not in RETUNED)
    yield from ((cell, slow) for cell in RETUNED)


def function_of(library: str, case: Case, device: str) -> Call:
    """A function of the inputs by our names, `cu_seqlens` and whether the final state is wanted."""
    if library == "deltazoo":
        backend = "triton" if device == "cuda" else "chunkwise"
        return lambda cu_seqlens, state, **inputs: delta_rule(**inputs, cu_seqlens=cu_seqlens, backend=backend)
    module, name = ("fla.ops.delta_rule", "chunk_delta_rule")
    if case.decay == "scalar":
        module, name = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    if library == "flashqla":
        if case.decay == "none":
            raise NotImplementedError("FlashQLA has no operator without a gate")
        module = "flash_qla"
    function = getattr(importlib.import_module(module), name)

    def call(cu_seqlens: Tensor | None, state: bool, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        if "log_decay" in inputs:
            inputs["g"] = inputs.pop("log_decay")
        result: tuple[Tensor, Tensor | None] = function(**inputs, cu_seqlens=cu_seqlens, output_final_state=state)
        return result

    return call


def inputs_of(cell: str, case: Case, device: str) -> tuple[dict[str, Tensor], Tensor | None, Tensor, Tensor]:
    """As `case_inputs`, without infinite decay, and only what is present."""
    inputs, cu_seqlens, d_output, d_state = case_inputs(case, device)
    present = {name: x for name, x in inputs.items() if x is not None}
    if "log_decay" in present:
        present["log_decay"] = present["log_decay"].clamp(min=2 * case.mean_log_decay)
    if cell.startswith("negative eigenvalues"):
        present["beta"] = 2 * present["beta"]
    return {name: x.requires_grad_() for name, x in present.items()}, cu_seqlens, d_output, d_state


def results(
    function: Call, inputs: dict[str, Tensor], cu_seqlens: Tensor | None, gradients: tuple[Tensor, Tensor], state: bool
) -> dict[str, Tensor]:
    """Output and every gradient, for a gradient of the output; with `state` the final state and its gradient too."""
    output, final = function(cu_seqlens=cu_seqlens, state=state, **inputs)
    named = {"output": output} | ({"final_state": final} if state and final is not None else {})
    sent = [gradient.to(x.dtype) for gradient, x in zip(gradients, named.values(), strict=False)]
    found = torch.autograd.grad(list(named.values()), list(inputs.values()), sent)
    by_name = {f"d_{name}": gradient for name, gradient in zip(inputs, found, strict=True)}
    return {name: x.detach() for name, x in (named | by_name).items()}


def measure(cell: str, case: Case, libraries: list[str], device: str, timer: Timer) -> Iterator[dict[str, Any]]:
    """One row per library."""
    inputs, cu_seqlens, *both = inputs_of(cell, case, device)
    gradients, state = (both[0], both[1]), case.initial_state
    exact_inputs = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    exact_gradients = (gradients[0].double(), gradients[1].double())

    def loop(cu_seqlens: Tensor | None, state: bool, **given: Any) -> tuple[Tensor, Tensor]:
        return delta_rule(**given, cu_seqlens=cu_seqlens, backend="chunkwise")

    exact = results(loop, exact_inputs, cu_seqlens, exact_gradients, state)
    for library in libraries:
        row: dict[str, Any] = dict(cell=cell, library=library, sizes=str(case))
        try:
            function = function_of(library, case, device)

            def forward(function: Call = function) -> object:
                with torch.no_grad():
                    return function(cu_seqlens=cu_seqlens, state=state, **inputs)

            def training(function: Call = function) -> dict[str, Tensor]:
                return results(function, inputs, cu_seqlens, gradients, state)

            row["forward_ms"] = timer.milliseconds(forward).median
            row["errors"] = relative_errors(training(), exact, inputs)
            row["forward_backward_ms"] = timer.milliseconds(training).median
            if device == "cuda":
                row["peak_mib"] = timer.peak_mib(training)
        except Exception as error:  # peers and kernels under test may raise anything
            row["error"] = one_line(error)
        yield row


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file; rows of an existing one are kept")
    parser.add_argument("--commit", help="of what is measured; read from git unless given")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script on small inputs")
    parser.add_argument("--libraries", default=",".join(LIBRARIES), help="some of them")
    options = parser.parse_args()
    # As `deltazoo bench ops` has it for fla-tilelang; flash-linear-attention reads these at every call.
    os.environ |= {"FLA_TILELANG": "1", "FLA_FLASH_QLA": "0"}
    timer = timer_for(options.device)
    run = describe_run(device=options.device, commit=options.commit, command=[Path(sys.argv[0]).name, *sys.argv[1:]])
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    done = {(row["cell"], row["library"]) for row in rows}
    for cell, libraries in order(options.libraries.split(",")):
        case = CELLS[cell]
        if options.device == "cpu":
            lengths = (30, 1, 0, 39) if case.lengths else ()
            case = replace(case, B=1 if lengths else 2, T=70, H=max(case.H // 4, 1), HV=4, K=16, V=16, lengths=lengths)
        wanted = [name for name in libraries if (cell, name) not in done]
        for row in measure(cell, case, wanted, options.device, timer) if wanted else ():
            rows.append(row)
            write_results(options.out, run, rows=rows)
            errors = [9.0 if error is None else error for error in row.get("errors", {}).values()]
            shown = {
                name: round(row[name], 3) for name in ("forward_ms", "forward_backward_ms", "peak_mib") if name in row
            }
            print(
                f"{cell:<45} {row['library']:<12}",
                shown,
                f"{max(errors, default=0):.1e}",
                row.get("error", ""),
                flush=True,
            )
            if "error" in row and options.device == "cuda":
                try:
                    timer.wait()
                except RuntimeError as error:
                    print(f"the GPU no longer answers this process ({error}); going on in a new one", flush=True)
                    os.execv(sys.executable, sys.orig_argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
