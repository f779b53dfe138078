"""Time and memory of one layer of every rule, in one run: forward, with backward, and a step of decoding. Needs a GPU.

    python scripts/measure_rules.py --out benchmarks/results/rules_h200.json --commit $(git rev-parse HEAD)

Layers have the same width, heads and head sizes, whatever their papers chose, so rules differ in what they compute and
in their own projections alone. bfloat16, no option set. Kernels are compiled in processes side by side first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import describe_run
from benchmarks.result_files import write_results
from benchmarks.timing import timer_for
from deltazoo.layers import DeltaRuleAttention, LayerStates, make_layer
from deltazoo.spec import list_rules

SIZES = {"B": 8, "T": 4096, "hidden_size": 2048, "num_heads": 16, "head_dim": 128}
DECODED_ROWS = 64


def make(rule: str, device: str) -> DeltaRuleAttention:
    """A layer of the sizes that all rules have here."""
    layer = make_layer(rule, SIZES["hidden_size"], SIZES["num_heads"], SIZES["head_dim"], expand_v=1.0, layer_idx=0)
    return layer.to(device, torch.bfloat16)


def calls(rule: str, device: str) -> dict[str, Callable[[], object]]:
    """What is timed."""
    torch.manual_seed(0)
    layer = make(rule, device)
    x = torch.randn(SIZES["B"], SIZES["T"], SIZES["hidden_size"], device=device, dtype=torch.bfloat16)
    tensors = [x.requires_grad_(), *layer.parameters()]
    gradient = torch.randn_like(x)
    token = torch.randn(DECODED_ROWS, 1, SIZES["hidden_size"], device=device, dtype=torch.bfloat16)
    states = LayerStates()

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def decode() -> None:
        with torch.no_grad():
            layer(token, past_key_values=states)

    decode()
    return {
        "forward_ms": forward,
        "forward_backward_ms": lambda: torch.autograd.grad(layer(x), tensors, gradient),
        "decode_ms": decode,
    }


def measure(rule: str, device: str) -> dict[str, Any]:
    """One row of the results."""
    timer, timed = timer_for(device), calls(rule, device)
    found: dict[str, Any] = {"rule": rule, "parameters": sum(p.numel() for p in make(rule, "meta").parameters())}
    for name, call in timed.items():
        spread = timer.graph_milliseconds(call) if name == "decode_ms" else timer.milliseconds(call)
        found[name] = round(spread.median, 4)
    found["peak_mib"] = round(timer.peak_mib(timed["forward_backward_ms"]), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON result file; without it kernels are compiled and nothing else")
    parser.add_argument("--commit", help="read from git unless given")
    parser.add_argument("--rules", default=",".join(list_rules()))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile kernels first; 0 for none")
    args = parser.parse_args()
    rules = args.rules.split(",")
    if args.out is None:
        for rule in rules:
            for call in calls(rule, args.device).values():
                call()
        return
    if args.jobs:
        compile_one = [sys.executable, __file__, "--device", args.device, "--rules"]
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda rule: subprocess.run([*compile_one, rule], check=True), rules))
    rows = [measure(rule, args.device) for rule in rules]
    run = describe_run(device=args.device, commit=args.commit, command=["scripts/measure_rules.py"])
    write_results(args.out, run, sizes=SIZES | {"decoded_rows": DECODED_ROWS}, rows=rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
