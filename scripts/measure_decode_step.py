"""Times of every tile of the Triton decode kernel, for several batch sizes and head sizes.

    python scripts/measure_decode_step.py decode.json [--batches 1 8 64 256 --heads 16 --sizes 128 64 256 --seconds 50]

Each configuration is first compared with the token loop in float64, then timed in a CUDA graph with events. `us` is one
step in place on states that come from memory (a ring of states larger than the L2 cache), `us L2` the same on one state
again and again, `GB/s` the state read and written once over `us`. A configuration that fails is a row with its error;
what does not fit into --seconds is a row that says so. Exit status 1 if anything computed was wrong or failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.provenance import git_commit
from deltazoo.ops import reference
from deltazoo.ops.triton import decode
from deltazoo.ops.triton.decode import Tile

DEVICE = "cuda"
SCALE = 128**-0.5
BEYOND_L2 = 256 * 2**20

TILES = [
    Tile(16, 1),
    Tile(32, 2),
    Tile(32, 4),
    Tile(8, 1),
    Tile(32, 1),
    Tile(16, 2),
    Tile(64, 4),
    Tile(64, 8),
    Tile(16, 1, "evict_first"),
    Tile(32, 4, "evict_first"),
]


def make_inputs(B: int, H: int, K: int, V: int, decay: str = "scalar", beta: bool = True) -> dict[str, Any]:
    """One token per sequence, unit keys, mild gates; q, k and v in bfloat16, gates in float32."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    gate_shape = {"none": None, "scalar": (B, 1, H), "channel": (B, 1, H, K)}[decay]
    return {
        "q": torch.nn.functional.normalize(normal(B, 1, H, K), dim=-1).bfloat16(),
        "k": torch.nn.functional.normalize(normal(B, 1, H, K), dim=-1).bfloat16(),
        "v": normal(B, 1, H, V).bfloat16(),
        "beta": normal(B, 1, H).sigmoid() if beta else None,
        "log_decay": None if gate_shape is None else torch.nn.functional.logsigmoid(normal(*gate_shape)) / 16,
    }


def launch(inputs: dict[str, Any], state: Tensor, new_state: Tensor, tile: Tile) -> Tensor:
    output = torch.empty_like(inputs["v"])
    decode.launch(**inputs, state=state, new_state=new_state, output=output, scale=SCALE, tile=tile)
    return output


def check(K: int, V: int, tile: Tile, decay: str = "scalar", beta: bool = True) -> dict[str, Any]:
    """Errors against the loop in float64; right if at most twice those of the loop in float32, up to one rounding."""
    inputs = make_inputs(3, 4, K, V, decay, beta)
    state = torch.randn(3, 4, K, V, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    new_state = torch.full_like(state, float("nan"))
    output = launch(inputs, state, new_state, tile)
    wide = [None if x is None else x.double() for x in inputs.values()]
    plain = reference.recurrent_loop(*inputs.values(), SCALE, state, None)
    exact = reference.recurrent_loop(*wide, SCALE, state.double(), None)

    def error(actual: Tensor, expected: Tensor) -> float:
        return ((actual.double() - expected).norm() / expected.norm()).item()

    errors = [error(output, exact[0]), error(new_state, exact[1])]
    allowed = [2 * error(p, e) + torch.finfo(p.dtype).eps for p, e in zip(plain, exact, strict=True)]
    in_place = state.clone()
    same = torch.equal(launch(inputs, in_place, in_place, tile), output) and torch.equal(in_place, new_state)
    right = same and all(e <= a for e, a in zip(errors, allowed, strict=True))
    return {"right": right, "output_error": errors[0], "state_error": errors[1], "in_place_same_bits": same}


def microseconds_in_graph(calls: list[Callable[[], object]], replays: int = 10) -> float:
    """Median time of one of `calls`, captured one after the other in one CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return statistics.median(times)


def ring_of_states(B: int, H: int, K: int, V: int) -> list[Tensor]:
    """States that together do not fit into the L2 cache, so that each step finds its own in memory."""
    number = min(256, max(2, BEYOND_L2 // (4 * B * H * K * V)))
    return list(torch.randn(number, B, H, K, V, device=DEVICE).unbind())


def time_steps(step: Callable[[Tensor], object], states: list[Tensor]) -> dict[str, float]:
    """One step over the ring of states, and over its first state again and again."""
    traffic = 2 * states[0].numel() * states[0].element_size()
    num_calls = max(len(states), min(32, 2**30 // traffic), 2)
    cold = microseconds_in_graph([functools.partial(step, states[i % len(states)]) for i in range(num_calls)])
    timing = {"us": cold, "gb_per_s": traffic / cold / 1e3}
    if traffic < 64 * 2**20:
        timing["us_l2"] = microseconds_in_graph([functools.partial(step, states[0])] * num_calls)
    return timing


def compiled_resources() -> dict[str, int]:
    """Registers and spills of the kernel compiled last."""
    compiled = list(decode.decode_kernel.device_caches[torch.cuda.current_device()][0].values())[-1]
    return {"registers": compiled.n_regs, "spills": compiled.n_spills, "shared": compiled.metadata.shared}


def host_microseconds(call: Callable[[], object], calls: int = 300) -> float:
    """CPU time of one eager call, on a GPU that is faster than that."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) * 1e6 / calls)
    return statistics.median(times)


class Report:
    """Measured rows: each is printed and written to the file at once, so that a later failure loses nothing."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.deadline = time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        self.about = {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": git_commit(),
        }
        print(self.about)

    def add(self, compute: Callable[[], dict[str, Any]], **names: Any) -> bool:
        """Adds the row `names` with what `compute` returns, or with its error; True if it returned."""
        row: dict[str, Any] = dict(names)
        if time.monotonic() > self.deadline:
            row["skipped"] = "no time left"
        else:
            try:
                row.update(compute())
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:500]
        self.rows.append(row)
        self.path.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1))
        print("  ".join(f"{name} {show(value)}" for name, value in row.items()), flush=True)
        return not row.keys() & {"skipped", "error"}

    @property
    def failed(self) -> bool:
        return any("error" in row or row.get("right") is False for row in self.rows)


def show(value: Any) -> str:
    if isinstance(value, Tile):
        return f"{value.columns}x{value.warps}w{' ' + value.eviction if value.eviction else ''}".ljust(17)
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < abs(value) < 0.01 else f"{value:9.2f}"
    return str(value)


def time_tile(B: int, H: int, K: int, tile: Tile, decay: str = "scalar", beta: bool = True) -> dict[str, float]:
    inputs = make_inputs(B, H, K, K, decay, beta)
    return time_steps(lambda state: launch(inputs, state, state, tile), ring_of_states(B, H, K, K))


def time_copy(B: int, H: int, K: int) -> dict[str, float]:
    """For comparison: the same bytes read and written by torch's own copy."""
    states = ring_of_states(B, H, K, K)
    return time_steps(torch.empty_like(states[0]).copy_, states)


def time_functional(B: int, H: int, K: int) -> dict[str, float]:
    """The form that writes the new state to a tensor of its own."""
    inputs = make_inputs(B, H, K, K)
    step = functools.partial(decode.recurrent_step, **inputs, scale=SCALE)
    return time_steps(lambda state: step(state=state), ring_of_states(B, H, K, K))


def measure_tiles(report: Report, batches: list[int], H: int, K: int) -> None:
    def check_tile(tile: Tile) -> dict[str, Any]:
        return {**check(K, K, tile), **compiled_resources()}

    rows = triton.next_power_of_2(K)
    sensible = [t for t in TILES if t.columns <= K and 128 * t.warps <= rows * t.columns <= 4096 * t.warps]
    tiles = [t for t in sensible if report.add(lambda t=t: check_tile(t), kind="check", K=K, tile=t)]
    for B in batches:
        report.add(lambda B=B: time_copy(B, H, K), kind="copy", K=K, B=B)
        for tile in tiles:
            report.add(lambda B=B, t=tile: time_tile(B, H, K, t), kind="step", K=K, B=B, tile=tile)


def measure_rules(report: Report, H: int, K: int, B: int = 64) -> None:
    """Every switch of the kernel with the launcher's own tile."""
    tile = decode.choose_tile(K, K)

    def check_and_time(decay: str, beta: bool) -> dict[str, Any]:
        return {**check(K, K, tile, decay, beta), **time_tile(B, H, K, tile, decay, beta)}

    for decay in ("none", "scalar", "channel"):
        for beta in (True, False):
            report.add(
                functools.partial(check_and_time, decay, beta), kind="rule", K=K, B=B, tile=tile, decay=decay, beta=beta
            )
    report.add(lambda: time_functional(B, H, K), kind="functional", K=K, B=B, tile=tile)


def measure_host(report: Report, H: int, K: int) -> None:
    """The kernel's launch alone, and the operators around it, at B = 1."""

    def host(call: str) -> dict[str, float]:
        inputs, state = make_inputs(1, H, K, K), torch.zeros(1, H, K, K, device=DEVICE)
        arguments = {**inputs, "state": state, "scale": SCALE}
        if call == "launch":
            spare = {"new_state": state, "output": torch.empty_like(inputs["v"]), "tile": decode.choose_tile(K, K)}
            return {"host_us": host_microseconds(functools.partial(decode.launch, **arguments, **spare))}
        step = functools.partial(decode.recurrent_step, **arguments, inplace=call == "in place")
        with torch.inference_mode():
            return {"host_us": host_microseconds(step)}

    for call in ("launch", "functional", "in place"):
        report.add(functools.partial(host, call), kind="host", K=K, call=call)


def print_table(rows: list[dict[str, Any]]) -> None:
    steps = [r for r in rows if r["kind"] == "step" and "us" in r]
    for K in dict.fromkeys(r["K"] for r in steps):
        of_size = [r for r in steps if r["K"] == K]
        batches = list(dict.fromkeys(r["B"] for r in of_size))
        chosen = decode.choose_tile(K, K)
        copies = {r["B"]: r for r in rows if r["kind"] == "copy" and r["K"] == K and "us" in r}
        print(f"\nK = V = {K}: us (us L2) GB/s; * = the launcher's choice")
        print("".ljust(20) + "".join(f"B = {B}".rjust(28) for B in batches))
        lines = {f"{'* ' if t == chosen else '  '}{show(t)}": t for t in dict.fromkeys(r["tile"] for r in of_size)}
        for label, tile in lines.items():
            print_line(label, [next((r for r in of_size if r["tile"] == tile and r["B"] == B), {}) for B in batches])
        if copies:
            print_line("  copy", [copies.get(B, {}) for B in batches])


def print_line(label: str, cells: list[dict[str, Any]]) -> None:
    def cell(r: dict[str, Any]) -> str:
        warm = f" ({r['us_l2']:.2f})" if "us_l2" in r else ""
        return f"{r['us']:.2f}{warm} {r['gb_per_s']:.0f}" if "us" in r else "-"

    print(label.ljust(20) + "".join(cell(r).rjust(28) for r in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="where the JSON goes")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 64, 256], help="K = V")
    parser.add_argument("--seconds", type=float, default=50)
    args = parser.parse_args()
    report = Report(args.path, args.seconds)
    try:
        for i, K in enumerate(args.sizes):
            measure_tiles(report, args.batches, args.heads, K)
            if i == 0:
                measure_rules(report, args.heads, K)
                measure_host(report, args.heads, K)
    finally:
        print_table(report.rows)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
