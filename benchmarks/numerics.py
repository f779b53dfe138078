"""Errors of the operator on hard inputs, and errors and times of each precision. Needs a GPU.

    python -m benchmarks.numerics --out benchmarks/results/numerics_h200.json --measure cases
    python -m benchmarks.numerics --out benchmarks/results/precision_h200.json --measure times

Errors are relative, norm of the difference over norm of the exact values, of output, final state and every gradient,
against the chunk form in float64 on the same rounded inputs. `torch` is the chunk form in torch whose products
round their operands to the dtype of the inputs, as the kernels' do. Step sizes are at most 2 / |k|^2 of the rounded
key.

* `cases`: `default` is the Triton backend as it runs, Gluon kernels where they serve the call, and plain Triton kernels
  elsewhere; `plain` has the plain kernels only, and is left out where the default launched no Gluon kernel; `fast` and
  `strict` are the precisions, in bfloat16. `forward` are errors of a call that records no gradients.
* `times`: medians of samples taken in turn, three calls of each precision per round, with a cold L2 cache; `over_fast`
  and `over_strict` are medians of the quotients within a round.

Processes side by side compile most of the time: one per decay, dtype and part of the cases, and before the others one
per operator and precision.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common import Results, Row, Timer, captured, one_line, options, side_by_side
from benchmarks.inputs import TABLE, Inputs, Shape, make_inputs
from deltazoo.checks.kernel_check import DTYPES, Case, case_inputs, case_results, plain_torch
from deltazoo.layers import bounded_step
from deltazoo.ops import delta_rule

# Cases.

DECAYS = ("none", "scalar", "channel")
APART = ("packed rows", "4 value heads per key head", "few heads, long rows")
"""Cases whose kernels the others do not share."""


def cases(decay: str) -> dict[str, Case]:
    """The inputs by name: 8 rows of 1,000 tokens and 16 heads of 128 unless the name says otherwise."""
    base = Case(decay, 128, 128, B=8, T=1000, H=16, HV=16, initial_state=True, mean_log_decay=-0.05)
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
        "77 tokens": replace(base, T=77),
        "packed rows": replace(base, B=1, T=2 * T, lengths=(T // 3, 0, 1, 2 * T - T // 3 - 1)),
        "4 value heads per key head": replace(base, H=max(H // 4, 1), HV=4 * max(H // 4, 1)),
        "few heads, long rows": replace(base, B=1, T=8192, H=2, HV=2),
    }
    if decay == "none":
        found = {name: case for name, case in found.items() if case.mean_log_decay in (-0.05, -1e-3)}
        del found["all forgotten at one token"]
    return found


@contextmanager
def recorded_launches() -> Iterator[list[str]]:
    """Collects the names of the Gluon kernels that are launched in the meantime, each once, in order."""
    from deltazoo.ops.triton import delta_rule, launch  # noqa: F401, imports every launcher

    names: list[str] = []

    def recording(kernel: Any, *arguments: Any) -> None:
        if hasattr(kernel, "is_gluon") and kernel.is_gluon() and kernel.__name__ not in names:
            names.append(kernel.__name__)
        launch.launch(kernel, *arguments)

    watched = [x for name, x in sys.modules.items() if name.startswith("deltazoo.ops.triton.") and x is not launch]
    with ExitStack() as replaced:
        for module in watched:
            if getattr(module, "launch", None) is launch.launch:
                replaced.enter_context(patch.object(module, "launch", recording))
        yield names


@contextmanager
def plain_kernels_only() -> Iterator[None]:
    """No Gluon kernel is available in the meantime."""
    from deltazoo.ops.triton import plan, problem

    with patch.object(problem, "card_of", lambda device: plan.card_of(device)._replace(gluon=False)):
        yield


def relative_errors(
    found: Mapping[str, Tensor], exact: Mapping[str, Tensor], inputs: Mapping[str, Tensor | None]
) -> dict[str, float | None]:
    """Norm of the error of every result over the norm of the exact one; None where a result is not finite.

    The gradient of the decay is a running sum of `q dq - k dk`, and measured against these terms where they cancel.
    A result that should be zero has its absolute error.

    Args:
        found: the results to judge, some or all of those in `exact`.
        exact: results in float64.
        inputs: q and k at least.
    """
    errors: dict[str, float | None] = {}
    for name, result in found.items():
        size = float(exact[name].norm())
        if name == "d_log_decay":
            terms = [
                float((x.detach().double() * exact[f"d_{n}"]).norm())
                for n in ("q", "k")
                if (x := inputs[n]) is not None
            ]
            size = max(size, 8 * sum(terms))
        error = float((result.double() - exact[name]).norm()) / (size or 1.0)
        errors[name] = error if math.isfinite(error) else None
    return errors


def measure_case(name: str, case: Case, device: str) -> Iterator[Row]:
    """Gluon kernels and errors of each implementation."""
    inputs, cu_seqlens, d_output, d_state = case_inputs(case, device)
    k, beta, log_decay = inputs["k"], inputs["beta"], inputs["log_decay"]
    assert k is not None and beta is not None
    inputs["beta"] = bounded_step(beta, k.repeat_interleave(case.HV // case.H, 2))
    if log_decay is not None and name != "all forgotten at one token":
        inputs["log_decay"] = log_decay.clamp(min=2 * case.mean_log_decay)
    exact_inputs = {n: None if x is None else x.double() for n, x in inputs.items()}
    gradients = (d_output.double(), d_state.double())
    exact = case_results(exact_inputs, *gradients, backend="chunkwise", cu_seqlens=cu_seqlens)

    def triton(precision: str | None = None) -> Row:
        with recorded_launches() as kernels, torch.no_grad():
            output, state = delta_rule(  # type: ignore[arg-type]
                **inputs, cu_seqlens=cu_seqlens, backend="triton", precision=precision
            )
        forward = relative_errors({"output": output, "final_state": state}, exact, inputs)
        with recorded_launches() as more:
            found = case_results(
                inputs, d_output, d_state, backend="triton", cu_seqlens=cu_seqlens, precision=precision
            )
        launched = {"gluon_forward": kernels, "gluon_training": more}
        return launched | {"forward": forward, "errors": relative_errors(found, exact, inputs)}

    default = triton()
    yield {"implementation": "default"} | default
    if default["gluon_forward"] or default["gluon_training"]:
        with plain_kernels_only():
            yield {"implementation": "plain"} | triton()
    if case.dtype == "bfloat16":
        for precision in ("fast", "strict"):
            yield {"implementation": precision} | triton(precision)
    found = plain_torch(inputs, d_output, d_state, cu_seqlens=cu_seqlens)
    yield {"implementation": "torch", "errors": relative_errors(found, exact, inputs)}


def print_group(decay: str, dtype: str, part: str, arguments: argparse.Namespace) -> None:
    """Print all rows of a decay, a dtype and a part of the cases; a case that fails gives a row with its error."""
    for name, case in cases(decay).items():
        if (name in APART) == (part == "apart"):
            case = replace(case, dtype=dtype)
            row = {"case": name, "decay": decay, "dtype": dtype, "sizes": str(case)}
            try:
                for found in measure_case(name, case, arguments.device):
                    print(json.dumps(row | found), flush=True)
            except Exception as error:  # a kernel under test may raise anything
                print(json.dumps(row | {"error": one_line(error)}), flush=True)


def measure_cases(results: Results, arguments: argparse.Namespace) -> None:
    """All groups, each in a process of its own."""
    groups = list(product(DECAYS, DTYPES, ("others", "apart")))
    for group, (status, printed) in zip(groups, again_with("--group", groups, arguments), strict=True):
        lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        if status:
            lines.append({"case": "the rest", "decay": group[0], "dtype": group[1], "error": f"exit status {status}"})
        for row in lines:
            setting = {key: row.pop(key) for key in ("case", "decay", "dtype", "sizes", "implementation") if key in row}
            results.add({"kind": "cases", **setting}, row)


def again_with(flag: str, groups: list[tuple[str, ...]], arguments: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """This module with its own arguments and a group, in processes side by side."""
    command = ["-m", "benchmarks.numerics", *sys.argv[1:], flag]
    yield from side_by_side([[*command, *group] for group in groups], arguments.jobs)


# Precisions.

PRECISIONS: dict[str, str | None] = {"default": None, "fast": "fast", "strict": "strict"}
SHAPES = (TABLE["train"], TABLE["long"])
OPS = {"delta": "none", "gdn": "medium", "kda": "medium"}
"""Operator -> strength of its gates."""


def output_of(x: Inputs, precision: str | None) -> Tensor:
    """The output, with its graph."""
    return delta_rule(x.q, x.k, x.v, x.beta, x.log_decay, backend="triton", precision=precision).output


def calls_of(op: str, x: Inputs, precision: str | None) -> dict[str, Callable[[], object]]:
    """A forward call without gradients, and one with all gradients."""
    forward = partial(output_of, x, precision)
    return {
        "forward": torch.no_grad()(forward),
        "forward+backward": lambda: torch.autograd.grad(forward(), x.leaves(op), x.d_output),
    }


def measure_times(results: Results, op: str, shape: Shape, beta: float | None, rounds: int) -> None:
    """One row per pass and way of launching; step sizes below 1, or one for all tokens."""
    timer, order = Timer("cuda"), random.Random(0)
    x = make_inputs(shape, op, OPS[op], device="cuda")
    if beta is not None:
        assert x.beta is not None
        x = replace(x, beta=torch.full_like(x.beta, beta).requires_grad_())
    for kind, way in product(("forward", "forward+backward"), ("eager", "graph")):
        calls = {name: calls_of(op, x, precision)[kind] for name, precision in PRECISIONS.items()}
        graphs = {name: captured(call) for name, call in calls.items()} if way == "graph" else {}
        calls |= {name: graph.replay for name, graph in graphs.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for i in range(rounds + 3):
            for name in order.sample(list(calls), len(calls)):
                sample = statistics.median(timer.samples(calls[name], 3))
                if i >= 3:
                    samples[name].append(sample)
        for graph in graphs.values():
            graph.reset()
        row = {f"{name}_ms": statistics.median(taken) for name, taken in samples.items()} | {"rounds": rounds}
        for name in ("fast", "strict"):
            quotients = (a / b for a, b in zip(samples["default"], samples[name], strict=True))
            row[f"over_{name}"] = statistics.median(quotients)
        setting = {"op": op, "gates": OPS[op], "shape": str(shape), "beta": beta, "pass": kind, "launched": way}
        results.add({"kind": "times", **setting}, row)


def compile_kernels(op: str, precision: str, rows: str) -> None:
    """Run the measured calls on short sequences, so that their kernels are in Triton's cache."""
    shape = Shape(8, 128, 16, 128, 128) if rows == "many" else Shape(1, 16384, 16, 128, 128)
    for call in calls_of(op, make_inputs(shape, op, OPS[op], device="cuda"), PRECISIONS[precision]).values():
        call()


def main() -> int:
    """Command line; exit status 1 if a case failed."""
    parser = options(__doc__)
    parser.add_argument("--measure", nargs="+", default=["cases", "times"], choices=("cases", "times"))
    parser.add_argument("--rounds", type=int, default=40, help="rounds of samples of each time")
    parser.add_argument("--jobs", type=int, default=12, help="processes at a time")
    parser.add_argument("--group", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.group:
        print_group(*arguments.group, arguments)
        return 0
    if arguments.compile:
        compile_kernels(*arguments.compile)
        return 0
    results = Results(arguments)
    if "cases" in arguments.measure:
        measure_cases(results, arguments)
    if "times" in arguments.measure:
        list(again_with("--compile", list(product(OPS, PRECISIONS, ("many", "one"))), arguments))
        for op, shape, beta in product(OPS, SHAPES, (None, 1.9)):
            measure_times(results, op, shape, beta, arguments.rounds)
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
