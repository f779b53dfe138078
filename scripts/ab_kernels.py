"""Time every kernel of one call with other launch options than the shipped ones, and check what each of them computes.

    python -m scripts.ab_kernels --op gdn --out ab_gdn.json
    python -m scripts.ab_kernels --op kda --shape narrow --out ab_narrow.json

Every launch of a forward and backward pass is repeated on its own, with its inputs as they were. `error` is the largest
relative difference between an output of the rule and of the shipped form. For the scans and the
chunk gradients, the row `float32` is the same kernel on the same inputs in float32, with its own tiles: the error of
the shipped form itself.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmarks.common import Timer
from benchmarks.inputs import GATE_KINDS, TABLE, Shape, make_inputs
from deltazoo.checks.kernel_check import relative_error
from deltazoo.ops import delta_rule
from deltazoo.ops.triton import delta_rule as operator  # noqa: F401, imports every launcher
from deltazoo.ops.triton import launch as launching
from deltazoo.ops.triton.tiles import tiles_for


def tile(stages: int | None = None, **options: Any) -> dict[str, Any]:
    """Launch options; the kernels take the number of stages twice."""
    return options if stages is None else options | dict(num_stages=stages, STAGES=stages)


SERIAL = {
    "1 stage": tile(1),
    "3 stages": tile(3),
    "BV 32": tile(BV=32, num_warps=4),
    "BV 64, 4 warps": tile(BV=64, num_warps=4),
    "BV 64, 4 warps, 1 stage": tile(1, BV=64, num_warps=4),
    "BV 64, 4 warps, 3 stages": tile(3, BV=64, num_warps=4),
    "BV 128, 8 warps": tile(2, BV=128, num_warps=8),
    "BV 128, 8 warps, 3 stages": tile(3, BV=128, num_warps=8),
    "BV 128, 8 warps, 4 stages": tile(4, BV=128, num_warps=8),
}
CHANNEL = {
    "BK 16": tile(BK=16),
    "BK 64": tile(BK=64),
    "200 registers": tile(maxnreg=200),
    "168 registers": tile(maxnreg=168),
}
RULES: dict[str, dict[str, dict[str, Any]]] = {
    "prepare": {
        "any registers": tile(maxnreg=None),
        "168 registers": tile(maxnreg=168),
        "96 registers": tile(maxnreg=96),
    },
    "prepare_channel": {
        "strong decay by 64 channels": tile(STRONG_BK=64, STRONG_RUNS=16, strong_tiles=2),
    },
    "scan": SERIAL,
    "scan(keep)": SERIAL,
    "reverse_scan(keep)": SERIAL,
    "chunk_gradients": {
        "2 stages": tile(2),
        "3 stages": tile(3),
        "BV 32": tile(BV=32),
        "BV 32, 4 stages": tile(4, BV=32),
        "BK 16": tile(BK=16),
        "BK 16, 3 stages": tile(3, BK=16),
        "BK 64": tile(BK=64),
    },
    "chunk_gradients_channel": {
        "2 stages": tile(2),
        "BK 16": tile(BK=16),
        "BK 16, 4 stages": tile(4, BK=16),
        "BK 64, BV 64": tile(2, BK=64, BV=64),
        "BK 32, BV 64": tile(2, BV=64),
    },
    # No tiles of 16 channels: ptxas 12.8 loses a descriptor of shared memory there.
    "chunk_gradients_levels(strong)": {
        "2 stages": tile(2),
        "8 warps": tile(num_warps=8),
        "8 warps, 2 stages": tile(2, num_warps=8),
        "8 warps, BV 64": tile(BV=64, num_warps=8),
        "8 warps, BK 64": tile(BK=64, num_warps=8),
    },
}
WRITTEN = {
    "prepare": ("AP", "chunk_beta", "G", "strict_L"),
    "prepare_channel": ("AP", "chunk_beta", "G", "strong_decay", "strict_L", "q_in", "k_in", "k_out"),
    "scan": ("output", "final_state"),
    "scan(keep)": ("U_out", "states"),
    "reverse_scan(keep)": ("Z_out", "d_states", "d_initial"),
    "chunk_gradients": ("dq", "dk", "dv", "d_beta", "d_log_decay"),
    "chunk_gradients_channel": ("dq", "dk", "dv", "d_beta", "d_log_decay"),
    "chunk_gradients_levels(strong)": ("dq", "dk", "dv", "d_beta", "d_log_decay"),
}
IN_FLOAT32 = ("scan", "scan(keep)", "reverse_scan(keep)", "chunk_gradients", "chunk_gradients_channel")


@dataclass
class Launch:
    """One launch as it was made: the kernel, its grid and its arguments by name, options among them."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """As in `RULES`."""
        keep = "(keep)" if self.arguments.get("KEEP") else "(strong)" if self.arguments.get("STRONG") else ""
        return self.kernel.fn.__name__.removesuffix("_kernel") + keep

    @property
    def written(self) -> tuple[str, ...]:
        """Names of its outputs."""
        return tuple(name for name in WRITTEN[self.name.removesuffix("(strong)")] if self.arguments[name] is not None)

    def run(self, changes: dict[str, Any]) -> tuple[Callable[[], object], dict[str, Tensor]]:
        """The launch with changed arguments and outputs of its own, and these outputs."""
        arguments = self.arguments | changes
        grid = list(self.grid)
        if "scan" in self.name:
            before, now = (-(-x["V"] // x["BV"]) for x in (self.arguments, arguments))
            grid[0] = grid[0] // before * now
        for count, size, block in (("value_tiles", "V", "BV"), ("key_tiles", "K", "BK")):
            if count in arguments:
                arguments[count] = -(-arguments[size] // arguments[block])
        own = {arguments[name].data_ptr(): torch.zeros_like(arguments[name]) for name in self.written}
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.data_ptr() in own:
                fresh = own[value.data_ptr()]
                arguments[name] = fresh if fresh.dtype == value.dtype else fresh.view(value.dtype)
        outputs = {name: arguments[name] for name in self.written}
        return lambda: self.kernel[tuple(grid)](**arguments), outputs


@contextmanager
def recorded(launches: dict[str, Launch]) -> Iterator[None]:
    """Collects the first launch of each kind in the meantime."""

    def record(kernel: Any, constants: launching.Constants, *tensors: Any) -> None:
        arguments = dict(zip(kernel.arg_names, tensors, strict=False)) | constants.named
        made = Launch(kernel, constants.grid, arguments)
        if made.name in RULES:
            launches.setdefault(made.name, made)
        launch(kernel, constants, *tensors)

    launch = launching.launch
    watched = [x for name, x in sys.modules.items() if name.startswith("deltazoo.ops.triton.")]
    watched = [module for module in watched if getattr(module, "launch", None) is launch]
    for module in watched:
        module.launch = record  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in watched:
            module.launch = launch  # type: ignore[attr-defined]


def launches_of(shape: Shape, op: str, gates: str, precision: str) -> dict[str, Launch]:
    """Every kind of launch in a forward and backward pass."""
    launches: dict[str, Launch] = {}
    inputs = make_inputs(shape, op, gates if op != "delta" else "none", device="cuda")
    with recorded(launches):
        output = delta_rule(
            inputs.q, inputs.k, inputs.v, inputs.beta, inputs.log_decay, backend="triton", precision=precision
        ).output
        torch.autograd.grad(output, inputs.leaves(op), inputs.d_output)
    return launches


def in_float32(launch: Launch, shape: Shape) -> dict[str, Any]:
    """Changes that make a launch of a scan or of the chunk gradients compute in float32 from the same inputs."""
    tiles = tiles_for(
        shape.K, shape.V, False, launch.arguments.get("DECAY", "channel"), has_beta=True, strict=False, separate=False
    )
    tensors = {name: x for name, x in launch.arguments.items() if isinstance(x, Tensor)}
    changes: dict[str, Any] = {name: x.float() for name, x in tensors.items() if x.is_floating_point()}
    options = {"chunk_gradients": tiles.gradients, "chunk_gradients_channel": tiles.gradients}
    options |= {"reverse_scan(keep)": tiles.reverse_scan, "scan(keep)": tiles.scan_keep}
    strict = launch.arguments.get("STRICT", False)
    if "AP" in changes and strict:  # below the diagonal is the inverse's second term, mirrored
        A, P = changes["AP"].unbind(1)
        changes["AP"] = torch.stack([A.triu() + A.tril(-1).mT, P], 1)
    fast = dict(STRICT=False) if strict else {}
    return changes | options.get(launch.name, tiles.scan) | dict(PRECISION="tf32x3") | fast


def worst_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative difference of every output; infinity for NaN."""
    errors = {name: relative_error(actual[name], e) for name, e in expected.items()}
    return {name: math.inf if math.isnan(error) else error for name, error in errors.items()}


def measure(launch: Launch, shape: Shape, timer: Timer) -> list[dict[str, Any]]:
    """One row per rule, the shipped form first."""
    run, shipped = launch.run({})
    run()
    rows: list[dict[str, Any]] = []
    rules = {"shipped": {}, **RULES[launch.name]}
    if launch.name in IN_FLOAT32:
        rules["float32"] = in_float32(launch, shape)
    for name, changes in rules.items():
        row: dict[str, Any] = dict(kernel=launch.name, rule=name)
        try:
            run, outputs = launch.run(changes)
            run()
            row["errors"] = worst_error(outputs, shipped)
            row["ms"] = timer.milliseconds(run).value
        except (RuntimeError, triton.TritonError) as error:  # too much shared memory, or a broken kernel
            row["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            timer.wait()  # raises if the kernel broke the device: then this process can measure nothing more
        rows.append(row)
        errors = row.get("errors", {})
        text = (
            row.get("failed") or f"{row['ms']:.4f} ms, error {max(errors.values()):.1e} ({max(errors, key=errors.get)})"
        )
        print(f"{launch.name:<20} {name:<26} {text}", flush=True)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=("delta", "gdn", "kda"), default="gdn")
    parser.add_argument("--shape", default="train", help=f"{', '.join(TABLE)} or BxTxHxKxV")
    parser.add_argument("--gates", choices=GATE_KINDS, default="medium")
    parser.add_argument("--precision", choices=("fast", "strict"), default="fast")
    parser.add_argument("--kernels", help="comma-separated; all unless given")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    shape = TABLE.get(arguments.shape) or Shape.parse(arguments.shape)
    wanted = arguments.kernels.split(",") if arguments.kernels else list(RULES)
    launches = launches_of(shape, arguments.op, arguments.gates, arguments.precision)
    timer = Timer("cuda")
    rows = [row for name, launch in launches.items() if name in wanted for row in measure(launch, shape, timer)]
    if arguments.out is not None:
        about = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
        call = dict(shape=str(shape), op=arguments.op, gates=arguments.gates, precision=arguments.precision)
        arguments.out.write_text(json.dumps(dict(about=about, call=call, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
