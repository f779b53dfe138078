"""How much faster the chunk form is than the token loop on a CPU, forward and backward together.

    python benchmarks/chunkwise_vs_loop.py [--batch 1 --heads 4 --tokens 2048 --key-dim 64 --value-dim 64 --threads 2]

Prints one row per decay kind and exits with status 1 if a ratio falls below --at-least (20).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from deltazoo.ops import delta_rule

DECAY_KINDS = ("none", "scalar", "channel")


def make_inputs(args: argparse.Namespace, decay: str) -> dict[str, Tensor]:
    B, T, H, K, V = args.batch, args.tokens, args.heads, args.key_dim, args.value_dim
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {
        "q": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        "k": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, H, V),
        "beta": normal(B, T, H).sigmoid(),
    }
    if decay != "none":
        shape = (B, T, H) if decay == "scalar" else (B, T, H, K)
        inputs["log_decay"] = torch.nn.functional.logsigmoid(normal(*shape)) / 16
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def forward_and_backward(inputs: dict[str, Tensor], backend: str) -> None:
    output, final_state = delta_rule(**inputs, backend=backend)
    torch.autograd.grad(output.sum() + final_state.sum(), list(inputs.values()))


def best_seconds(call: Callable[[], None], repeats: int) -> float:
    """The fastest of several runs: on a shared machine everything else only adds to it."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"batch": 1, "heads": 4, "tokens": 2048, "key-dim": 64, "value-dim": 64, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--at-least", type=float, default=20.0, help="smallest ratio that passes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    print(f"torch {torch.__version__}, float32, {args.threads} threads, forward + backward, best of several runs")
    print(f"B={args.batch} H={args.heads} T={args.tokens} K={args.key_dim} V={args.value_dim}")
    print(f"{'decay':<10}{'loop':>12}{'chunkwise':>12}{'ratio':>8}")
    ratios = []
    for decay in DECAY_KINDS:
        inputs = make_inputs(args, decay)
        chunkwise = best_seconds(lambda inputs=inputs: forward_and_backward(inputs, "chunkwise"), repeats=15)
        loop = best_seconds(lambda inputs=inputs: forward_and_backward(inputs, "reference"), repeats=5)
        ratios.append(loop / chunkwise)
        print(f"{decay:<10}{loop * 1e3:>9.1f} ms{chunkwise * 1e3:>9.1f} ms{ratios[-1]:>7.1f}x")
    return 0 if min(ratios) >= args.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
