"""Errors on repeated keys and times of each precision of the operator. Needs a GPU.

    python scripts/measure_precision.py --out benchmarks/results/precision_h200.json --commit $(git rev-parse HEAD)

Errors are relative, in the root-mean-square sense, of the output, the final state and every gradient, against the chunk
form in float64 on the same rounded inputs. The gradient of the decay is a running sum of `q dq - k dk`, and measured
against these terms where they cancel. `plain torch` is the chunk form in torch, whose products round their operands as
the kernels' do. Step sizes are at most 2 / |k|^2 of the rounded key except where the keys say `longer`.

Times are medians of samples taken in turn, three calls of each precision per round, with a cold L2 cache;
`over_fast` and `over_strict` are medians of the quotients within a round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.inputs import Inputs, make_inputs
from benchmarks.provenance import describe_run
from benchmarks.result_files import write_results
from benchmarks.shapes import Shape
from benchmarks.timing import CudaTimer, captured
from deltazoo.checks.errors import plain_torch, relative_errors
from deltazoo.layers import bounded_step
from deltazoo.ops import delta_rule

PRECISIONS: dict[str, str | None] = {"default": None, "fast": "fast", "strict": "strict"}
SHAPES = {"train": Shape(8, 4096, 16, 128, 128), "long": Shape(1, 32768, 16, 128, 128)}
OPS = {"delta": "none", "gdn": "medium", "kda": "medium"}
"""Operator -> strength of its gates."""
KEYS = ("one key", "two keys in turn", "nearly parallel keys")
BETAS = (0.5, 1.0, 1.5, 1.9, 1.98, 2.0)
GAINS = (0.9, 0.98, 1.0, 1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LOG_DECAY = -1e-3
"""Mean log-decay in the tables of errors; the weaker, the more a repeated key adds up."""


def hard_inputs(keys: str, tokens: int, beta: float, decay: str, dtype: torch.dtype, *, gain: bool = False) -> Inputs:
    """16 heads of K = V = 128: 8 rows of up to 2,048 tokens, or one longer row, which is cut into segments.

    Args:
        beta: step size of all tokens; with `gain` the erase gain instead.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    B, H, K = 8 if tokens <= 2048 else 1, 16, 128

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    k = normal(B, tokens, H, K)
    if keys.startswith("one key"):
        k = k[:, :1].expand_as(k)
    elif keys == "two keys in turn":
        k = k[:, torch.arange(tokens, device="cuda") % 2]
    elif keys == "nearly parallel keys":  # cosine 0.99 with a common direction
        k = 0.99 * F.normalize(k[:, :1], dim=-1) + 0.02**0.5 * F.normalize(k, dim=-1)
    k = F.normalize(k, dim=-1).to(dtype)
    steps = torch.full((B, tokens, H), beta, device="cuda")
    if gain:
        steps = steps / k.double().square().sum(-1).float()
    elif not keys.endswith("longer"):
        steps = bounded_step(steps, k)
    size = {"none": None, "scalar": (B, tokens, H), "channel": (B, tokens, H, K)}[decay]
    log_decay = None if size is None else 2 * LOG_DECAY * torch.rand(size, generator=generator, device="cuda")
    q = F.normalize(normal(B, tokens, H, K), dim=-1).to(dtype)
    v, d_output = (normal(B, tokens, H, K).to(dtype) for _ in range(2))
    return Inputs(q, k, v, steps, log_decay, d_output)


def named(x: Inputs) -> dict[str, Tensor]:
    """The arguments of `delta_rule` that are present."""
    given = {"q": x.q, "k": x.k, "v": x.v, "beta": x.beta, "log_decay": x.log_decay}
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def state_gradient(x: Inputs) -> Tensor:
    """A random gradient of the final state, always the same."""
    B, _, HV, V = x.v.shape
    return torch.randn(B, HV, x.k.shape[-1], V, generator=torch.Generator("cuda").manual_seed(1), device="cuda")


def results(x: Inputs, dtype: torch.dtype | None = None, **options: Any) -> dict[str, Tensor]:
    """Output, final state and all gradients, for random gradients of both; `dtype` converts the inputs first."""
    leaves = {n: t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for n, t in named(x).items()}
    output, state = delta_rule(**leaves, **options)
    d_results = [x.d_output.to(output.dtype), state_gradient(x).to(state.dtype)]
    found = torch.autograd.grad([output, state], list(leaves.values()), d_results)
    gradients = {f"d_{name}": gradient for name, gradient in zip(leaves, found, strict=True)}
    return {"output": output.detach(), "final_state": state.detach(), **gradients}


def errors(x: Inputs, candidates: list[str]) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Name and relative errors of each candidate, None if one is not finite."""
    exact = results(x, torch.float64, backend="chunkwise")
    for name in candidates:
        if name == "plain torch":
            found = plain_torch(named(x), x.d_output, state_gradient(x))
        else:
            found = results(x, backend="triton", precision=PRECISIONS[name])
        yield name, relative_errors(found, exact, named(x))


def show(found: dict[str, float | None]) -> str:
    """Errors on one line."""
    return ", ".join(f"{name} {'not finite' if error is None else f'{error:.1e}'}" for name, error in found.items())


def hard_cases() -> Iterator[tuple[str, str, str, int, float]]:
    """dtype, decay, keys, tokens, step size."""
    for dtype in DTYPES:
        yield from product([dtype], ["none"], KEYS, (2048, 16384), BETAS)
        yield from product([dtype], ["none"], ["random keys", "one key, longer"], [2048], (1.0, 2.0))
        yield from product([dtype], ["scalar", "channel"], KEYS[::2], [2048], (1.0, 1.9, 2.0))


def measure_errors() -> list[dict[str, Any]]:
    """One row per hard case and candidate; and of the growth with the erase gain."""
    rows = []
    for dtype, decay, keys, tokens, beta in hard_cases():
        x = hard_inputs(keys, tokens, beta, decay, DTYPES[dtype])
        wanted = [*PRECISIONS] if (dtype, decay) == ("bfloat16", "none") else ["default"]
        for name, found in errors(x, [*wanted, "plain torch"]):
            row = dict(dtype=dtype, decay=decay, keys=keys, tokens=tokens, beta=beta, precision=name, errors=found)
            rows.append(row)
            print(f"{dtype} {decay} {keys} T{tokens} beta {beta} {name}: {show(found)}", flush=True)
    for keys, gain in product(KEYS[:2], GAINS):
        x = hard_inputs(keys, 16384, gain, "none", torch.bfloat16, gain=True)
        for name, found in errors(x, ["fast", "strict"]):
            row = dict(dtype="bfloat16", decay="none", keys=keys, tokens=16384, gain=gain, precision=name)
            rows.append(row | {"errors": found})
            print(f"gain {gain} {keys} {name}: {show(found)}", flush=True)
    return rows


def timed_inputs(op: str, shape: Shape, beta: float | None) -> Inputs:
    """As `deltazoo bench` times them, step sizes below 1; or with one step size for all tokens."""
    x = make_inputs(shape, op, OPS[op], device="cuda")
    return x if beta is None else replace(x, beta=torch.full_like(x.beta, beta).requires_grad_())


def calls_of(op: str, x: Inputs, precision: str | None) -> dict[str, Callable[[], object]]:
    """A forward call without gradients, and one with all gradients."""

    def output() -> Tensor:
        return delta_rule(x.q, x.k, x.v, x.beta, x.log_decay, backend="triton", precision=precision).output

    def forward() -> Tensor:
        with torch.no_grad():
            return output()

    return {"forward": forward, "forward+backward": lambda: torch.autograd.grad(output(), x.leaves(op), x.d_output)}


def measure_times(op: str, shape: Shape, beta: float | None, rounds: int) -> list[dict[str, Any]]:
    """One row per pass and way of launching."""
    timer, order, x = CudaTimer(), random.Random(0), timed_inputs(op, shape, beta)
    rows = []
    for kind, way in product(("forward", "forward+backward"), ("eager", "graph")):
        calls = {name: calls_of(op, x, precision)[kind] for name, precision in PRECISIONS.items()}
        graphs = {name: captured(call) for name, call in calls.items()} if way == "graph" else {}
        calls |= {name: graph.replay for name, graph in graphs.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for i in range(rounds + 3):
            for name in order.sample(list(calls), len(calls)):
                sample = statistics.median(timer._timed(calls[name], 3))
                if i >= 3:
                    samples[name].append(sample)
        over = {
            name: statistics.median(a / b for a, b in zip(samples["default"], samples[name], strict=True))
            for name in ("fast", "strict")
        }
        for graph in graphs.values():
            graph.reset()
        row = dict(op=op, gates=OPS[op], shape=str(shape), beta=beta, kind=kind, launched=way, rounds=rounds)
        rows.append(row | {f"{name}_ms": statistics.median(s) for name, s in samples.items()})
        rows[-1] |= {"over_fast": over["fast"], "over_strict": over["strict"]}
        print(json.dumps(rows[-1]), flush=True)
    return rows


def measure_memory(op: str, shape: Shape) -> list[dict[str, Any]]:
    """Peak memory of forward and backward above the inputs, and memory kept between the two."""
    x, rows = timed_inputs(op, shape, None), []
    for name, precision in PRECISIONS.items():
        call = calls_of(op, x, precision)["forward+backward"]
        peak = CudaTimer().peak_mib(call)
        held = torch.cuda.memory_allocated()
        output = delta_rule(x.q, x.k, x.v, x.beta, x.log_decay, backend="triton", precision=precision).output
        kept = (torch.cuda.memory_allocated() - held) / 2**20
        del output
        rows.append(dict(op=op, shape=str(shape), precision=name, peak_mib=peak, kept_mib=kept))
    return rows


def compile_kernels(op: str, precision: str, rows: str) -> None:
    """Run the measured calls on short sequences, so that their kernels are in Triton's cache."""
    shape = Shape(8, 128, 16, 128, 128) if rows == "many" else Shape(1, 16384, 16, 128, 128)
    for dtype in DTYPES.values():
        x = make_inputs(shape, op, OPS[op], device="cuda", dtype=dtype)
        if dtype == torch.bfloat16:
            for call in calls_of(op, x, PRECISIONS[precision]).values():
                call()
        if dtype == torch.bfloat16 or precision == "default":
            results(x, backend="triton", precision=PRECISIONS[precision])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for all rows")
    parser.add_argument("--commit", help="of what is measured; read from git unless given")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of samples of each time")
    parser.add_argument("--only", choices=("errors", "times"), help="leave the other out")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile at a time")
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        compile_kernels(*arguments.compile)
        return
    commands = [[*sys.argv, "--compile", *x] for x in product(OPS, PRECISIONS, ("many", "one"))]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda c: subprocess.run([sys.executable, *c], check=False), commands))
    run = describe_run(device="cuda", commit=arguments.commit, command=[Path(sys.argv[0]).name, *sys.argv[1:]])
    content: dict[str, Any] = {}
    if arguments.only != "errors":
        configurations = list(product(OPS, SHAPES.values(), (None, 1.9)))
        content["times"] = [row for c in configurations for row in measure_times(*c, arguments.rounds)]
        content["memory"] = [row for op in OPS for row in measure_memory(op, SHAPES["train"])]
        write_results(arguments.out, run, **content)
    if arguments.only != "times":
        content["errors"] = measure_errors()
    write_results(arguments.out, run, **content)


if __name__ == "__main__":
    main()
