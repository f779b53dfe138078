"""Layers: what each rule costs, and flash-linear-attention's own layers on its functions and on ours.

    python -m benchmarks.layers --out benchmarks/results/rule_layers_h200.json --measure rules
    python -m benchmarks.layers --out benchmarks/results/fla_layers_h200.json --measure fla

`rules`: forward, forward and backward, and a decoding step of one layer of every rule. All have the same width, heads
and head sizes, whatever their papers chose, so rules differ in what they compute and in their own projections alone.

`fla`: the layers' code is the library's. For "ours" the functions and modules that it imports are replaced, in this
process alone, by those of `deltazoo.compat.fla`, and the layer loads the weights of "theirs". Errors are relative to
the layer in float32 on our functions: norm of the difference over that of the exact values, of the output and of the
gradient of the input and of each parameter. Eager mode, in turns; medians, least and most over the rounds.

bfloat16, no option set. Kernels are compiled in processes side by side first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from tempfile import TemporaryDirectory
from types import ModuleType

import torch
from torch import Tensor, nn

from benchmarks.common import Results, Row, Timer, one_line, options, side_by_side
from deltazoo.checks.kernel_check import relative_error
from deltazoo.compat import fla as ours
from deltazoo.layers import LayerStates, make_layer
from deltazoo.spec import list_rules

FLA_LAYERS = {
    "DeltaNet": ("fla.layers.delta_net", False),
    "KimiDeltaAttention": ("fla.layers.kda", True),
    "GatedDeltaNet": ("fla.layers.gated_deltanet", True),
}
"""Module, and whether the layer takes a size of heads."""
DECODED_ROWS = 64
ROUNDS = 3


def rule_calls(rule: str, sizes: Row, device: str) -> dict[str, Callable[[], object]]:
    """What is timed of a rule."""
    torch.manual_seed(0)
    width = sizes["heads"] * sizes["head_dim"]
    layer = make_layer(rule, width, sizes["heads"], sizes["head_dim"], expand_v=1.0, layer_idx=0)
    layer = layer.to(device, torch.bfloat16)
    x = torch.randn(sizes["batch"], sizes["tokens"], width, device=device, dtype=torch.bfloat16)
    tensors = [x.requires_grad_(), *layer.parameters()]
    gradient = torch.randn_like(x)
    token = torch.randn(DECODED_ROWS, 1, width, device=device, dtype=torch.bfloat16)
    states = LayerStates()
    no_gradient = torch.no_grad()
    decode = no_gradient(lambda: layer(token, past_key_values=states))
    decode()
    return {
        "forward_ms": no_gradient(lambda: layer(x)),
        "forward_backward_ms": lambda: torch.autograd.grad(layer(x), tensors, gradient),
        "decode_ms": decode,
    }


def measure_rule(rule: str, sizes: Row, device: str, timer: Timer) -> Row:
    """Medians."""
    found = {}
    for name, call in rule_calls(rule, sizes, device).items():
        take = timer.graph_milliseconds if timer.on_gpu and name == "decode_ms" else timer.milliseconds
        found[name] = round(take(call).value, 4)
        if timer.on_gpu and name == "forward_backward_ms":
            found["peak_mib"] = round(timer.peak_mib(call), 1)
    return found


@contextmanager
def functions_of(module: ModuleType, way: str) -> Iterator[None]:
    """Inside, the names that a module of the library imported are ours, or its own."""
    before = {name: getattr(module, name) for name in ours.__all__ if hasattr(module, name)}
    assert not any(value is getattr(ours, name) for name, value in before.items())
    try:
        if way == "ours":
            for name in before:
                setattr(module, name, getattr(ours, name))
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def results_of(layer: nn.Module, x: Tensor, seed: Tensor) -> dict[str, Tensor]:
    """Output of a training call, and gradients by name."""
    x = x.detach().requires_grad_()
    y = layer(x)[0]
    names = ["input", *(name for name, _ in layer.named_parameters())]
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], seed)
    return {"output": y.detach()} | {f"gradient of {n}": g for n, g in zip(names, gradients, strict=True)}


def measure_fla(name: str, sizes: Row, device: str, timer: Timer) -> Row:
    """Errors, differences, times and memory of both ways."""
    path, takes_head_dim = FLA_LAYERS[name]
    module = import_module(path)
    make = partial(getattr(module, name), hidden_size=sizes["heads"] * sizes["head_dim"], num_heads=sizes["heads"])
    make = partial(make, layer_idx=0, **({"head_dim": sizes["head_dim"]} if takes_head_dim else {}))
    make = partial(make, expand_v=1) if name == "GatedDeltaNet" else make
    torch.manual_seed(0)
    layers = {"theirs": make().to(device, torch.bfloat16)}
    shape = sizes["batch"], sizes["tokens"], sizes["heads"] * sizes["head_dim"]
    x, seed = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    with functions_of(module, "ours"):
        layers["ours"], exact = make().to(device, torch.bfloat16), make().to(device)
        for layer in (layers["ours"], exact):
            layer.load_state_dict(layers["theirs"].state_dict())
        wanted = results_of(exact, x.float(), seed.float())
    row: Row = {"parameters": sum(p.numel() for p in exact.parameters()), "theirs": {}, "ours": {}}
    found: dict[str, dict[str, Tensor]] = {}
    for way, layer in layers.items():
        with functions_of(module, way):
            try:
                found[way] = results_of(layer, x, seed)
                row[way]["errors"] = {key: relative_error(value, wanted[key]) for key, value in found[way].items()}
            except Exception as error:  # its own functions fail on a CPU
                row[way]["error"] = one_line(error)
    if len(found) == 2:
        row["differences"] = {key: relative_error(found["theirs"][key], found["ours"][key]) for key in wanted}
    found, wanted = dict.fromkeys(found, {}), {}
    samples: dict[str, dict[str, list[float]]] = {way: {"forward_ms": [], "training_ms": []} for way in found}
    for _ in range(ROUNDS):  # in turns, so that a slow moment of the machine slows both
        for way, taken in samples.items():
            layer = layers[way]
            with functions_of(module, way):
                taken["forward_ms"].append(timer.milliseconds(torch.no_grad()(partial(layer, x))).value)
                taken["training_ms"].append(timer.milliseconds(partial(results_of, layer, x, seed)).value)
                if timer.on_gpu:
                    row[way]["training_mib"] = timer.peak_mib(partial(results_of, layer, x, seed))
    for way, taken in samples.items():
        for key, values in taken.items():
            row[way][key] = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return row


def compile_first(names: list[str], arguments: argparse.Namespace) -> None:
    """Run everything once in processes of their own, `--jobs` at a time, so that kernels are in Triton's cache."""
    command = ["-m", "benchmarks.layers", "--jobs", "0", "--device", arguments.device, "--measure", arguments.measure]
    for option in ("batch", "tokens", "heads", "head_dim"):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    with TemporaryDirectory() as folder:
        commands = [[*command, "--only", name, "--out", f"{folder}/{name}.json"] for name in names]
        for name, (status, _) in zip(names, side_by_side(commands, arguments.jobs), strict=True):
            print(f"compiled {name}: exit status {status}", flush=True)


def main() -> int:
    """Command line; exit status 1 if a measurement failed."""
    parser = options(__doc__)
    parser.add_argument("--measure", choices=("rules", "fla"), default="rules")
    parser.add_argument("--only", nargs="+", help="rules, or the library's layers")
    parser.add_argument("--batch", type=int, help="rows; 8, and 4 of the library's layers")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile kernels first; 0: none")
    arguments = parser.parse_args()
    arguments.batch = arguments.batch or (8 if arguments.measure == "rules" else 4)
    sizes = {name: getattr(arguments, name) for name in ("batch", "tokens", "heads", "head_dim")}
    names = arguments.only or list(list_rules() if arguments.measure == "rules" else FLA_LAYERS)
    if arguments.jobs:
        compile_first(names, arguments)
    results, timer = Results(arguments), Timer(arguments.device)
    measure, key = {"rules": (measure_rule, "rule"), "fla": (measure_fla, "layer")}[arguments.measure]
    for name in names:
        results.measure({key: name, **sizes}, partial(measure, name, sizes, arguments.device, timer))
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
