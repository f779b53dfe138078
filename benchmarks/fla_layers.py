"""flash-linear-attention's own layers on its functions, and on ours under the same names: errors, speed, memory.

    python scripts/compare_fla_layers.py                          # on an NVIDIA GPU, with flash-linear-attention
    python scripts/compare_fla_layers.py --compile 12             # the same, its kernels compiled in 12 processes
    python scripts/compare_fla_layers.py --device cpu --small     # a quick try: its own functions fail on a CPU

The layers' code is the library's. For "ours" the functions and modules that it imports are replaced, in this process
alone, by those of `deltazoo.compat.fla`, and the layer loads the weights of "theirs". Errors are relative to the layer
in float32 on our functions: root mean square of the difference over that of the exact values, of the output and of the
gradient of the input and of each parameter. Measured in eager mode, in turns. Writes a JSON file with the machine, the
versions and the commit after every layer.

The library tries hundreds of kernel configurations before its first results. `--compile N` lets N processes compile
them first, each a part; `--short-trials` lets each trial take 25 ms in place of 125. All of them are tried in any case.
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
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.provenance import describe_run
from benchmarks.result_files import write_results
from benchmarks.timing import timer_for
from deltazoo.checks.errors import relative_error
from deltazoo.compat import fla as ours

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
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="processes that compile first")
    parser.add_argument("--compile-limit", type=float, default=600, help="seconds they may take (default: 600)")
    parser.add_argument("--short-trials", action="store_true", help="try each kernel configuration for 25 ms")
    parser.add_argument("--compile-part", type=int, nargs=2, metavar=("I", "N"), help=argparse.SUPPRESS)
    parser.add_argument("--commit", help="of the code; read from git unless given")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/fla_layers_DEVICE.json")
    args = parser.parse_args()
    if args.small:
        args.batch, args.tokens = 2, 80
    if args.compile_part:
        compile_part(*args.compile_part, args)
        return 0
    compiling = start_compiling(args)
    if args.short_trials:
        shorten_trials()
    out = args.out or ROOT / "benchmarks" / "results" / f"fla_layers_{args.device}.json"
    run = describe_run(device=args.device, commit=args.commit, command=sys.argv[1:])
    rows = []
    problems = {name: Problem(name, args) for name in args.layers}  # while the others compile
    wait_for(compiling, args.compile_limit)
    for name in args.layers:
        rows.append(compare(name, args, problems.pop(name)))
        write_results(out, run, rows=rows)
        print(json.dumps(rows[-1]), flush=True)
    return 0


class Problem:
    """The library's own layer with random weights, the same on our functions, inputs, and the exact results."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.module = import_module(LAYERS[name][0])
        options = layer_options(name, args)
        make = partial(getattr(self.module, name), **options)
        torch.manual_seed(0)
        self.theirs = make().to(args.device, torch.bfloat16)
        shape = args.batch, args.tokens, options["hidden_size"]
        self.x, self.seed = (torch.randn(shape, device=args.device, dtype=torch.bfloat16) for _ in range(2))
        with our_functions(self.module):
            self.ours, exact = make().to(args.device, torch.bfloat16), make().to(args.device)
            self.ours.load_state_dict(self.theirs.state_dict())
            exact.load_state_dict(self.theirs.state_dict())
            self.wanted = results(exact, self.x.float(), self.seed.float())
        self.sizes = {"layer": name, "hidden_size": options["hidden_size"], "heads": options["num_heads"]}
        self.sizes |= {"head_dim": options["hidden_size"] // options["num_heads"]}
        self.sizes |= {"batch": args.batch, "tokens": args.tokens, "dtype": "bfloat16"}
        self.sizes |= {"parameters": sum(p.numel() for p in self.ours.parameters())}


def compare(name: str, args: argparse.Namespace, problem: Problem) -> dict[str, Any]:
    """One row: both ways in bfloat16, against float32."""
    x, seed, row = problem.x, problem.seed, problem.sizes
    ways = {
        "theirs": Way(problem.theirs, partial(library_functions, problem.module)),
        "ours": Way(problem.ours, partial(our_functions, problem.module)),
    }
    for way in ways.values():
        way.judge(x, seed, problem.wanted)
    a, b = (way.found for way in ways.values())
    row["differences"] = {key: relative_error(a[key], b[key]) for key in a.keys() & b.keys()}
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
        self.facts["errors"] = {key: relative_error(value, wanted[key]) for key, value in self.found.items()}

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


def start_compiling(args: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """This script in several processes, each of which compiles a part of the kernel configurations."""
    sizes = ["--batch", str(args.batch), "--tokens", str(args.tokens), *["--small"] * args.small]
    command = [sys.executable, __file__, "--device", args.device, *sizes, "--layers", *args.layers, "--compile-part"]
    environment = os.environ | {"FLA_CACHE_RESULTS": "0"}
    return [subprocess.Popen([*command, str(i), str(args.compile)], env=environment) for i in range(args.compile)]


def wait_for(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all have ended, and end those that take longer."""
    end = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()


def compile_part(part: int, parts: int, args: argparse.Namespace) -> None:
    """Run the library's layers with every `parts`-th kernel configuration, each of which runs once.

    A failure is for the process that measures to report.
    """
    from triton.runtime.autotuner import Autotuner

    initialise = Autotuner.__init__

    def with_fewer(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **options: Any) -> None:
        # Kernels with few configurations begin with different processes.
        mine = [x for i, x in enumerate(configs) if (i + len(arg_names)) % parts == part] or configs[:1]
        initialise(self, fn, arg_names, mine, *rest, **options)

    def once(call: Callable[[], object], quantiles: Any = None, **_: Any) -> list[float]:
        call()
        return [1.0, 1.0, 1.0]

    Autotuner.__init__ = with_fewer  # type: ignore[method-assign]
    Autotuner.do_bench = property(lambda self: once)  # type: ignore[assignment]
    import_little()
    for name in args.layers:
        options = layer_options(name, args)
        layer = getattr(import_module(LAYERS[name][0]), name)(**options).to(args.device, torch.bfloat16)
        shape = args.batch, args.tokens, options["hidden_size"]
        x = torch.randn(shape, device=args.device, dtype=torch.bfloat16)
        with suppress(Exception):
            forward(layer, x)
        with suppress(Exception):
            results(layer, x, x)


def import_little() -> None:
    """Let the library's packages import only what these layers need, in half the time."""
    spec = find_spec("fla")
    assert spec is not None and spec.submodule_search_locations is not None
    (root,) = spec.submodule_search_locations
    for name in ("fla", "fla.layers", "fla.ops"):
        package = ModuleType(name)
        package.__path__ = [str(Path(root, *name.split(".")[1:]))]
        package.__version__ = version("fla-core")
        sys.modules[name] = package


def shorten_trials() -> None:
    """Let every trial of a kernel configuration take 25 ms."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    Autotuner.do_bench = property(lambda self: partial(do_bench, warmup=5, rep=20))  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(main())
