"""The host's time for an eager training step, and its launches, beside transformers' Llama of the same size.

    python -m benchmarks.host --out run.json
    python -m benchmarks.host --out run.json --sources ../before/src src
    python -m benchmarks.host --out run.json --device cpu --shapes 1x32

A step is forward, backward and fused AdamW on random tokens, in bfloat16 on a GPU. Every source, a folder that holds
deltazoo/, has a process of its own; the processes take turns. What was measured:

    host_ms     until the calls of a step return to Python, the device idle before; by phase, and until it is idle again
    launches    per layer, forward and backward, products of matrices not counted: the difference of models of 4 and 2
                layers, by the profiler. `ours` are those that go through deltazoo's own `launch`, counted there
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from subprocess import PIPE
from types import FunctionType
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.common import Results, Row, Spread, options
from benchmarks.models import SIZES, TrainingStep, candidates, clear

PHASES = ("forward", "backward", "optimizer")
COUNTS = ("other", "products", "ours")
PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|splitk", re.IGNORECASE)
"""Names of the kernels of torch's matrix products."""


class Step(TrainingStep):
    """A step in phases, the clock read between them."""

    def phases(self, tokens: torch.Tensor) -> list[Callable[[], Any]]:
        loss: list[torch.Tensor] = []

        def forward() -> None:
            loss.append(self.model(input_ids=tokens, labels=tokens, use_cache=False).loss)

        def optimizer() -> None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

        return [forward, lambda: loss.pop().backward(), optimizer]

    def times(self, shape: list[int], steps: int) -> list[list[float]]:
        """Milliseconds `[steps, 4]`: of each phase until it returns, and of the step until the device is idle."""
        tokens, found = torch.randint(0, self.model.config.vocab_size, shape, device=self.device), []
        wait = torch.cuda.synchronize if self.device != "cpu" else lambda: None
        for _ in range(2 + steps):  # the first ones warm up
            wait()
            clock = [time.perf_counter()]
            for phase in self.phases(tokens):
                phase()
                clock.append(time.perf_counter())
            wait()
            until_idle = time.perf_counter() - clock[0]
            found.append([1e3 * (b - a) for a, b in zip(clock, clock[1:], strict=False)] + [1e3 * until_idle])
        return found[2:]

    def launches(self, shape: list[int]) -> list[list[int]]:
        """Numbers of launches `[2, 3]`, forward and backward: others, products of matrices, our own `launch`."""
        self.times(shape, 0)
        phases, ours, counts = self.phases(torch.zeros(shape, dtype=torch.long, device=self.device)), [0], []
        places = [
            (module, name, value)
            for module in list(sys.modules.values())
            if module.__name__.startswith("deltazoo.")
            for name, value in list(vars(module).items())
            if isinstance(value, FunctionType) and value.__name__ == "launch"
        ]

        def counted(launch: Callable[..., None], *arguments: Any) -> None:
            ours[0] += 1
            launch(*arguments)

        for module, name, value in places:
            setattr(module, name, partial(counted, value))
        for phase in phases[:2]:
            ours[0] = 0
            with torch.profiler.profile(activities=[getattr(ProfilerActivity, self.device.upper())]) as profile:
                phase()
                if self.device != "cpu":
                    torch.cuda.synchronize()
            kernels = [e.name for e in profile.events() if e.device_type == DeviceType.CUDA]
            products = sum(bool(PRODUCT.search(name)) for name in kernels)
            counts.append([len(kernels) - products, products, ours[0]])
        for module, name, value in places:
            setattr(module, name, value)
        return counts


def serve(device: str, rules: list[str]) -> None:
    """Answer each line of standard input: a model, a shape, and a number of steps to time or None to count launches."""
    setting = {"way": "eager", "dtype": "float32" if device == "cpu" else "bfloat16", "batch": 1, "tokens": 1}
    known: dict[str, Step] = {}

    def step(name: str, **changed: int) -> Step:
        size = replace(SIZES["quickstart" if device == "cpu" else "340m"], **changed)
        return Step(next(c for c in candidates(size, rules, ["llama"]) if c.model == name), setting, device)

    for line in sys.stdin:
        name, shape, steps = json.loads(line)
        answer: Any
        if steps:
            known[name] = known.get(name) or step(name)
            answer = known[name].times(shape, steps)
        else:
            few, many = (step(name, num_hidden_layers=layers).launches(shape) for layers in (2, 4))
            answer = [[(b - a) / 2 for a, b in zip(*pair, strict=True)] for pair in zip(few, many, strict=True)]
            clear()
        print(f"\x00{json.dumps(answer)}", flush=True)


def ask(process: subprocess.Popen[str], *question: Any) -> Any:
    assert process.stdin and process.stdout
    print(json.dumps(question), file=process.stdin, flush=True)
    return json.loads(next(line for line in process.stdout if line.startswith("\x00"))[1:])


def main() -> int:
    """Command line; exit status 1 if a measurement failed."""
    parser = options(__doc__)
    parser.add_argument("--sources", nargs="+", default=["src"], help="folders that hold deltazoo/")
    parser.add_argument("--rules", nargs="+", default=["gated_deltanet"])
    parser.add_argument("--shapes", nargs="+", default=["1x512", "1x2048", "2x4096"], help="ROWSxTOKENS")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.device, arguments.rules)
        return 0
    command = [sys.executable, "-m", "benchmarks.host", "--serve", "--out", "-", "--device", arguments.device]
    processes, root = {}, Path(__file__).resolve().parents[1]
    for source in arguments.sources:
        environment = os.environ | {"PYTHONPATH": f"{Path(source).resolve()}{os.pathsep}{root}"}
        processes[source] = subprocess.Popen(
            [*command, "--rules", *arguments.rules], stdin=PIPE, stdout=PIPE, text=True, env=environment
        )
    results, models = Results(arguments), [*arguments.rules, "llama"]
    for shape, model in product(arguments.shapes, models):
        found: dict[str, list[list[float]]] = {source: [] for source in processes}
        for _, (source, process) in product(range(arguments.rounds), processes.items()):
            found[source] += ask(process, model, [int(n) for n in shape.split("x")], arguments.steps)
        for source, steps in found.items():
            row: Row = vars(Spread.of([sum(step[:3]) for step in steps]))
            row |= {f"{name}_ms": median(step[i] for step in steps) for i, name in enumerate((*PHASES, "step"))}
            results.add({"source": source, "model": model, "shape": shape, "measure": "host_ms"}, row)
    for (source, process), model in product(processes.items(), models):
        counts = ask(process, model, [1, 32 if arguments.device == "cpu" else 512], None)
        row = {"value": sum(phase[0] for phase in counts)}
        row |= {name: dict(zip(COUNTS, phase, strict=True)) for name, phase in zip(PHASES, counts, strict=False)}
        results.add({"source": source, "model": model, "measure": "launches"}, row)
    for process in processes.values():
        process.communicate()
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
