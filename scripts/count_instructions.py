"""Instructions that a warp executes in each kernel of a forward and backward pass on Hopper, without a GPU.

    python scripts/count_instructions.py --decay channel --log-decay uneven
    python scripts/count_instructions.py --decay channel --log-decay uneven --lines chunk_gradients_strong

One chunk of one head in bfloat16, on the model of a thread block (tests/ptx), which runs Triton's PTX. It knows no
times, but where warps wait little the instructions are what a kernel costs. `--lines` says which lines of a kernel's
source they come from; lines of called functions are their own. Registers and spills are the compile tests'
(`make compile-test`).
"""

from __future__ import annotations

import argparse
import linecache
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytest import MonkeyPatch
from torch import Tensor
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from delta_rule_cases import DeltaRuleCase  # noqa: E402
from ops.triton.test_compiled_code import Modelled  # noqa: E402
from ptx.thread_block import Program, ThreadBlock  # noqa: E402

from deltazoo.ops.triton import pipeline  # noqa: E402


class Counted(Modelled):
    """Stands in for a kernel: a launch runs its first block and keeps what a warp executes."""

    found: dict[str, Counter[tuple[str, tuple[str, int]]]] = {}
    """By kernel: times of (operation, (file, line))."""

    def execute(self, program: Program, arguments: list[Any], memory: np.ndarray, grid: tuple[int, ...]) -> None:
        count = self.found.setdefault(self.kernel.fn.__name__.removesuffix("_kernel"), Counter())
        for position in product(*map(range, (*grid, 1, 1)[:3])):
            block = ThreadBlock(program, arguments, memory, position)
            block.run()
            for times, (_, operation, *_), source in zip(block.executed, program.code, program.sources, strict=True):
                count[operation.partition(".")[0], source] += times


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decay", choices=("none", "scalar", "channel"), default="channel")
    parser.add_argument("--log-decay", default="-0.05", help="a number, or mixed, reset, uneven")
    parser.add_argument("--head", type=int, nargs=2, default=(128, 128), metavar=("K", "V"))
    parser.add_argument("--lines", metavar="KERNEL", help="by lines of its source")
    arguments = parser.parse_args()
    kinds = ("mixed", "reset", "uneven")
    log_decay: Any = arguments.log_decay if arguments.log_decay in kinds else float(arguments.log_decay)
    K, V = arguments.head
    case = DeltaRuleCase("one", B=1, T=64, H=1, K=K, V=V, decay=arguments.decay, log_decay=log_decay, beta=0.7)
    x = case.make(dtype=torch.bfloat16)
    with MonkeyPatch.context() as patch:
        for name, kernel in list(vars(pipeline).items()):
            if isinstance(kernel, JITFunction):
                patch.setattr(pipeline, name, Counted(kernel, {}))
        inputs: tuple[Tensor | float | None, ...] = (x.q, x.k, x.v, x.beta, x.log_decay, K**-0.5, None, None, None)
        problem = pipeline.Problem(*inputs, None, False, 1)  # type: ignore[arg-type]
        _, _, kept = pipeline.forward(problem)
        pipeline.backward(problem, kept, x.d_output, x.d_final_state)
    if arguments.lines:
        by_line: Counter[tuple[str, int]] = Counter()
        for (_, source), times in Counted.found[arguments.lines].items():
            by_line[source] += times
        for (file, line), times in by_line.most_common(40):
            print(f"{times:6}  {Path(file).name}:{line}  {linecache.getline(file, line).strip()[:100]}")
        return
    for name, count in Counted.found.items():
        operations: Counter[str] = Counter()
        for (operation, _), times in count.items():
            operations[operation] += times
        most = ", ".join(f"{operation} {times}" for operation, times in operations.most_common(8))
        print(f"{name:32} {operations.total():6}  {most}")


if __name__ == "__main__":
    main()
