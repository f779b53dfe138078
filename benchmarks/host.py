"""The host's time for an eager training step, and its launches, beside transformers' Llama of the same size.

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
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen
from types import FunctionType
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.common import Results, Row, Spread, now, options
from benchmarks.models import SIZES, TrainingStep, candidates

PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|splitk", re.IGNORECASE)
"""Names of the kernels of torch's matrix products."""


class Step(TrainingStep):
    """A step in phases, the clock read between them."""

    def phases(self, tokens: torch.Tensor) -> Iterator[str]:
        """Each phase runs when the next name is asked for."""
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        yield "forward"
        loss.backward()
        yield "backward"
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        yield "optimizer"

    def times(self, shape: list[int], steps: int) -> list[Row]:
        """Milliseconds of each phase until it returns, and of the step until the device is idle, for every step."""
        tokens, found = torch.randint(0, self.model.config.vocab_size, shape, device=self.device), []
        for _ in range(2 + steps):  # the first ones warm up
            began = last = now(self.device)
            row = {}
            for name in self.phases(tokens):
                row[name], last = 1e3 * (time.perf_counter() - last), time.perf_counter()
            found.append(row | {"step": 1e3 * (now(self.device) - began)})
        return found[2:]

    def launches(self, shape: list[int]) -> dict[str, Row]:
        """Of each phase: products of matrices, all others, and calls of our own `launch`."""
        self.times(shape, 0)
        places = [
            (module, name, value)
            for module in list(sys.modules.values())
            if getattr(module, "__name__", "").startswith("deltazoo.")
            for name, value in list(vars(module).items())
            if isinstance(value, FunctionType) and value.__name__ == "launch"
        ]
        tokens, ours, counts = torch.zeros(shape, dtype=torch.long, device=self.device), [], {}
        activities = [getattr(ProfilerActivity, torch.device(self.device).type.upper())]

        def counted(launch: Callable[..., None], *arguments: Any) -> None:
            ours.append(launch)
            launch(*arguments)

        for module, name, value in places:
            setattr(module, name, partial(counted, value))
        for phases in (self.phases(tokens), self.phases(tokens)):  # a first profile may miss kernels
            for _ in range(3):
                ours.clear()
                with torch.profiler.profile(activities=activities) as profile:
                    phase = next(phases)
                    now(self.device)
                kernels = [e.name for e in profile.events() if e.device_type == DeviceType.CUDA]
                products = sum(bool(PRODUCT.search(name)) for name in kernels)
                counts[phase] = {"products": products, "others": len(kernels) - products, "ours": len(ours)}
        for module, name, value in places:
            setattr(module, name, value)
        return counts


def serve(device: str, rules: list[str]) -> None:
    """Answer each line of standard input: a model, a shape, and a number of steps to time or None to count launches."""
    setting = {"way": "eager", "dtype": "float32" if device == "cpu" else "bfloat16", "batch": 1, "tokens": 1}

    def step(name: str, **changed: int) -> Step:
        size = replace(SIZES["quickstart" if device == "cpu" else "340m"], **changed)
        made = Step(next(c for c in candidates(size, rules, ["llama"]) if c.model == name), setting, device)
        if "captured_training" in getattr(made.model, "runtime_options", ()):
            made.model.set_runtime(captured_training=False)
        return made

    kept = cache(step)
    for line in sys.stdin:
        name, shape, steps = json.loads(line)
        if steps:
            answer = kept(name).times(shape, steps)
        else:
            few, many = (step(name, num_hidden_layers=layers).launches(shape) for layers in (2, 4))
            answer = {phase: {key: (n - few[phase][key]) / 2 for key, n in row.items()} for phase, row in many.items()}
        print(f"\x00{json.dumps(answer)}", flush=True)


def ask(process: Popen[str], *question: Any) -> Any:
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
    command = [sys.executable, "-m", "benchmarks.host", "--serve", *sys.argv[1:]]
    processes, root = {}, Path(__file__).resolve().parents[1]
    for source in arguments.sources:
        path = os.pathsep.join([str(Path(source).resolve()), str(root), os.environ.get("PYTHONPATH", "")])
        processes[source] = Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
    results, models = Results(arguments), [*arguments.rules, "llama"]
    for shape, model in product(arguments.shapes, models):
        found: dict[str, list[Row]] = {source: [] for source in processes}
        for _, (source, process) in product(range(arguments.rounds), processes.items()):
            found[source] += ask(process, model, [int(n) for n in shape.split("x")], arguments.steps)
        for source, steps in found.items():
            row = vars(Spread.of([sum(step.values()) - step["step"] for step in steps]))
            row |= {f"{name}_ms": median(step[name] for step in steps) for name in steps[0]}
            results.add({"source": source, "model": model, "shape": shape, "measure": "host_ms"}, row)
    for (source, process), model in product(processes.items(), models):
        counts = ask(process, model, [1, 32 if arguments.device == "cpu" else 512], None)
        row = {"value": counts["forward"]["others"] + counts["backward"]["others"]} | counts
        results.add({"source": source, "model": model, "measure": "launches"}, row)
    for process in processes.values():
        process.communicate()
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
