"""flash-linear-attention's own layers on its functions, and on ours under the same names: errors, speed, memory.

    python scripts/compare_fla_layers.py                          # on an NVIDIA GPU, with flash-linear-attention
    python scripts/compare_fla_layers.py --compile 12             # before: compile its kernels in 12 processes
    python scripts/compare_fla_layers.py --device cpu --small     # a quick try: its own functions fail on a CPU

The layers' code is the library's. For "ours" the functions and modules that it imports are replaced, in this process
alone, by those of `deltazoo.interop.fla`, and the layer loads the weights of "theirs". Errors are relative to the layer
in float32 on our functions: root mean square of the difference over that of the exact values, of the output and of the
gradient of the input and of each parameter. Measured in eager mode, in turns. Writes a JSON file with the machine, the
versions and the commit after every layer.

The library tries hundreds of kernel configurations before its first results. `--compile N` lets N processes compile
them, each a part, so that a run after it finds them compiled; what the library chooses is not touched.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.interop import fla as ours
from deltazoo.workbench.bench.timing import timer_for
from deltazoo.workbench.provenance import describe_run

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {
    "DeltaNet": ("fla.layers.delta_net", {}),
    "KimiDeltaAttention": ("fla.layers.kda", {"head_dim": 128}),
    "GatedDeltaNet": ("fla.layers.gated_deltanet", {"head_dim": 128, "expand_v": 1}),
}
ROUNDS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--small", action="store_true", help="narrow layers and few tokens, for a quick try")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS), metavar="LAYER")
    parser.add_argument("--batch", type=int, default=4, help="rows (default: 4)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per row (default: 4096)")
    parser.add_argument("--compile", type=int, metavar="N", help="only compile, in so many processes")
    parser.add_argument("--compile-part", type=int, nargs=2, metavar=("I", "N"), help=argparse.SUPPRESS)
    parser.add_argument("--commit", help="of the code; read from git unless given")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/fla_layers_DEVICE.json")
    args = parser.parse_args()
    if args.small:
        args.batch, args.tokens = 2, 80
    if args.compile_part:
        compile_part(*args.compile_part)
        for name in args.layers:
            compile_layer(name, args)
        return 0
    if args.compile:
        return compile_in_parallel(args)
    out = args.out or ROOT / "benchmarks" / "results" / f"fla_layers_{args.device}.json"
    run = describe_run(device=args.device, commit=args.commit, command=sys.argv[1:])
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in args.layers:
        rows.append(compare(name, args))
        out.write_text(json.dumps({"run": asdict(run), "rows": rows}, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(rows[-1]), flush=True)
    return 0


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: both ways in bfloat16, against float32."""
    module, options = import_module(LAYERS[name][0]), layer_options(name, args)
    theirs, x, seed = problem(name, args, torch.bfloat16)
    with our_functions(module):
        mine = getattr(module, name)(**options).to(args.device, torch.bfloat16)
        mine.load_state_dict(theirs.state_dict())
        exact = getattr(module, name)(**options).to(args.device)
        exact.load_state_dict(theirs.state_dict())
        wanted = results(exact, x.float(), seed.float())
    del exact
    ways = {
        "theirs": Way(theirs, partial(library_functions, module)),
        "ours": Way(mine, partial(our_functions, module)),
    }
    for way in ways.values():
        way.judge(x, seed, wanted)
    row: dict[str, Any] = {"layer": name, "hidden_size": options["hidden_size"], "heads": options["num_heads"]}
    row |= {"head_dim": options["hidden_size"] // options["num_heads"], "batch": args.batch, "tokens": args.tokens}
    row |= {"dtype": "bfloat16", "parameters": sum(p.numel() for p in mine.parameters())}
    if all(way.found for way in ways.values()):
        a, b = (way.found for way in ways.values())
        row["differences"] = {key: relative(a[key], b[key]) for key in a.keys() & b.keys()}
    for way in ways.values():
        way.found = {}
    timer = timer_for(args.device)
    for _ in range(ROUNDS):  # in turns, so that a slow moment of the machine slows both
        for way in ways.values():
            way.measure(x, seed, timer)
    return row | {key: way.summary() for key, way in ways.items()}


class Way:
    """A layer on one set of functions, and what was found out about it."""

    def __init__(self, layer: nn.Module, functions: Callable[[], Any]) -> None:
        self.layer = layer
        self.functions = functions
        self.found: dict[str, Tensor] = {}
        self.facts: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.samples: dict[str, list[float]] = {"forward_ms": [], "training_ms": []}

    def judge(self, x: Tensor, seed: Tensor, wanted: dict[str, Tensor]) -> None:
        """Run it for the first time, and compare output and gradients with the exact ones."""
        with self.functions():
            started = time.perf_counter()
            self._try("forward_ms", lambda: self.found.update(forward(self.layer, x)))
            self._try("training_ms", lambda: self.found.update(results(self.layer, x, seed)))
            self.facts["first_call_s"] = time.perf_counter() - started
        self.facts["errors"] = {key: relative(value, wanted[key]) for key, value in self.found.items()}

    def measure(self, x: Tensor, seed: Tensor, timer: Any) -> None:
        """One more sample of every time, and the memory of training."""

        def train() -> None:
            gradients(self.layer, x, seed)

        with self.functions():
            if "forward_ms" not in self.failed:
                with torch.no_grad():
                    self.samples["forward_ms"].append(timer.milliseconds(lambda: self.layer(x)[0]).median)
            if "training_ms" not in self.failed:
                self.samples["training_ms"].append(timer.milliseconds(train).median)
                if x.is_cuda:
                    self.facts["training_mib"] = timer.peak_mib(train)

    def _try(self, measure: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # whatever it is belongs into the row
            self.failed[measure] = f"{type(error).__name__}: {error}"

    def summary(self) -> dict[str, Any]:
        """Medians, least and most over the rounds, errors, and why something is missing."""
        times = {
            key: {"median": statistics.median(values), "low": min(values), "high": max(values)}
            for key, values in self.samples.items()
            if values
        }
        return times | self.facts | ({"failed": self.failed} if self.failed else {})


def layer_options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    options = {"hidden_size": 2048, "num_heads": 16, "layer_idx": 0, **LAYERS[name][1]}
    if args.small:
        options |= {"hidden_size": 64, "num_heads": 2} | ({"head_dim": 32} if "head_dim" in options else {})
    return options


def problem(name: str, args: argparse.Namespace, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """The library's own layer with random weights, an input, and the gradient of the output."""
    torch.manual_seed(0)
    layer = getattr(import_module(LAYERS[name][0]), name)(**layer_options(name, args)).to(args.device, dtype)
    shape = args.batch, args.tokens, layer.hidden_size
    x, seed = (torch.randn(shape, device=args.device, dtype=dtype) for _ in range(2))
    return layer, x, seed


@contextmanager
def our_functions(module: ModuleType) -> Iterator[None]:
    """Inside, the names that a module of the library imported are ours."""
    before = {name: getattr(module, name) for name in ours.__all__ if hasattr(module, name)}
    try:
        for name in before:
            setattr(module, name, getattr(ours, name))
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextmanager
def library_functions(module: ModuleType) -> Iterator[None]:
    """Inside, the module's names are its own."""
    assert not any(getattr(module, name, None) is getattr(ours, name) for name in ours.__all__)
    yield


def forward(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"output": layer(x)[0].detach()}


def gradients(layer: nn.Module, x: Tensor, seed: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    x = x.detach().requires_grad_()
    y = layer(x)[0]
    return y.detach(), torch.autograd.grad(y, [x, *layer.parameters()], seed)


def results(layer: nn.Module, x: Tensor, seed: Tensor) -> dict[str, Tensor]:
    """Output of a training call, and gradients by name."""
    y, found = gradients(layer, x, seed)
    names = ["input", *(name for name, _ in layer.named_parameters())]
    return {"output": y} | {f"gradient of {name}": g for name, g in zip(names, found, strict=True)}


def relative(value: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of `wanted`."""
    return ((value.double() - wanted.double()).norm() / wanted.double().norm()).item()


def compile_in_parallel(args: argparse.Namespace) -> int:
    """Run this script in several processes, each of which compiles a part of the kernel configurations."""
    sizes = ["--batch", str(args.batch), "--tokens", str(args.tokens), *["--small"] * args.small]
    command = [sys.executable, __file__, "--device", args.device, *sizes, "--layers", *args.layers, "--compile-part"]
    environment = os.environ | {"FLA_CACHE_RESULTS": "0"}
    started = [subprocess.Popen([*command, str(i), str(args.compile)], env=environment) for i in range(args.compile)]
    return max(process.wait() for process in started)


def compile_part(part: int, parts: int) -> None:
    """Let Triton's trials of configurations in this process compile every `parts`-th one, and run it once."""
    from triton.runtime.autotuner import Autotuner

    initialise = Autotuner.__init__

    def with_fewer(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **options: Any) -> None:
        mine = [x for i, x in enumerate(configs) if (i + len(arg_names)) % parts == part] or configs[:1]
        initialise(self, fn, arg_names, mine, *rest, **options)

    def once(call: Callable[[], object], quantiles: Any = None, **_: Any) -> list[float]:
        call()
        return [1.0, 1.0, 1.0]

    Autotuner.__init__ = with_fewer  # type: ignore[method-assign]
    Autotuner.do_bench = property(lambda self: once)  # type: ignore[assignment]


def compile_layer(name: str, args: argparse.Namespace) -> None:
    """Run the library's layer both ways; a failure is for the process that measures to report."""
    layer, x, seed = problem(name, args, torch.bfloat16)
    with suppress(Exception):
        forward(layer, x)
    with suppress(Exception):
        results(layer, x, seed)


if __name__ == "__main__":
    sys.exit(main())
