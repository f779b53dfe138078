"""Time the same calls in two checkouts, in alternation, and compare their results bit for bit.

    python scripts/compare_checkouts.py ../before --out comparison.json

Small calls take as long as the host takes to prepare them; large ones, on a GPU, as long as their kernels. The other
checkout needs the names of the public interface alone. Times are the least of all rounds; a ratio above 1 says that
this checkout is slower.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
Call = Callable[[], Any]


def calls(device: str) -> Iterator[tuple[str, int, Call]]:
    """Name, repetitions per measurement, and the call; what it returns is compared."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    import deltazoo

    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def inputs(B: int, T: int, H: int, D: int, decay: str) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        q, k, v = torch.randn(3, B, T, H, D)
        sizes = {"none": None, "scalar": (B, T, H), "channel": (B, T, H, D)}[decay]
        log_decay = None if sizes is None else -0.1 * torch.rand(sizes)
        tensors = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, torch.rand(B, T, H), log_decay]
        return [x if x is None else x.to(device, dtype if x.ndim == 4 and i < 3 else None).requires_grad_()
                for i, x in enumerate(tensors)]  # fmt: skip

    def both_ways(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Call:
        def call() -> Any:
            output = function()
            return torch.autograd.grad(output, tensors, torch.ones_like(output))

        return call

    def output_of_rule(tensors: list[torch.Tensor | None]) -> torch.Tensor:
        return deltazoo.delta_rule(*tensors).output

    shapes = {"small": (1, 128, 2, 64)} | ({"large": (8, 4096, 16, 128)} if device == "cuda" else {})
    for size, shape in shapes.items():
        for decay in ("none", "scalar", "channel"):
            tensors = inputs(*shape, decay)
            given = [x for x in tensors if x is not None]
            rule = partial(output_of_rule, tensors)
            repetitions = 30 if size == "small" else 3
            yield f"operator, {size}, decay {decay}: forward", repetitions, torch.no_grad()(rule)
            yield f"operator, {size}, decay {decay}: with backward", repetitions, both_ways(rule, given)
    tokens = [x[:, :1].detach() for x in inputs(1, 2, 2, 64, "scalar") if x is not None]
    state = torch.zeros(1, 2, 64, 64, device=device)
    yield "operator, one token", 50, lambda: deltazoo.delta_rule_step(*tokens, state=state).output

    for name in ("DeltaNet", "GatedDeltaNet", "KimiDeltaAttention"):
        torch.manual_seed(0)
        layer = getattr(deltazoo, name)(64, 2, 32, layer_idx=0).to(device, dtype)
        x = torch.randn(1, 70, 64).to(device, dtype)
        yield f"{name}: forward", 20, torch.no_grad()(lambda layer=layer, x=x: layer(x))
        yield f"{name}: with backward", 20, both_ways(lambda layer=layer, x=x: layer(x), list(layer.parameters()))
        states = deltazoo.LayerStates()

        def decode(layer: Any = layer, x: Any = x, states: Any = states) -> Any:
            return layer(x[:, :1], past_key_values=states)

        yield f"{name}: one token", 30, torch.no_grad()(decode)

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_heads=2, vocab_size=256)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gated_deltanet", **sizes)).to(device, dtype)
    prompt = torch.arange(40, device=device)[None]
    yield "model: loss with backward", 5, both_ways(lambda: model(prompt, labels=prompt).loss, list(model.parameters()))
    model.eval()
    options = dict(max_new_tokens=16, do_sample=False)
    yield "model.generate, 16 tokens", 1, lambda: model.generate(prompt, **options)
    yield "deltazoo.generate, 16 tokens", 1, lambda: deltazoo.generate(model, prompt, max_new_tokens=16)


def serve(device: str) -> None:
    """Answer each line of standard input, a number, with that call's seconds and, the first time, its result's hash."""
    import torch

    torch.set_num_threads(1)
    known = list(calls(device))
    answer({"names": [name for name, *_ in known]})
    for line in sys.stdin:
        _, repetitions, call = known[int(line)]
        result = call()
        if device == "cuda":
            torch.cuda.synchronize()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            for _ in range(repetitions):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / repetitions)
        answer({"seconds": min(times), "hash": digest(result)})


def digest(result: Any) -> str:
    import torch

    tensors = result if isinstance(result, tuple | list) else [result]
    hashed = hashlib.blake2b(digest_size=8)
    for x in tensors:
        hashed.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def answer(value: dict[str, Any]) -> None:
    print("\x00" + json.dumps(value), flush=True)


class Checkout:
    """A process that runs the calls with one checkout's package."""

    def __init__(self, root: Path, device: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip

    def names(self) -> list[str]:
        """The names of the calls, once they are prepared."""
        return self._read()["names"]

    def ask(self, number: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(number, file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        stdout: IO[str] | None = self.process.stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith("\x00"):
                return json.loads(line[1:])
        raise RuntimeError(f"the process of a checkout ended with status {self.process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="root of the checkout to compare with")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", metavar="REGEX", help="calls whose names match")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", metavar="DEVICE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if options.other is None or not (options.other / "src" / "deltazoo").is_dir():
        parser.error(f"expected the root of another checkout, got {options.other}")
    pair = Checkout(ROOT, options.device), Checkout(options.other.resolve(), options.device)
    names, _ = [checkout.names() for checkout in pair]
    rows = []
    for number, name in enumerate(names):
        if not re.search(options.only, name):
            continue
        first = [checkout.ask(number) for checkout in pair]  # warms up
        same = first[0]["hash"] == first[1]["hash"]
        least = [math.inf, math.inf]
        for i in range(2 * options.rounds):  # each is asked first in every other round
            side = (i + i // 2) % 2
            least[side] = min(least[side], pair[side].ask(number)["seconds"])
        here, there = least
        rows.append({"call": name, "here_us": 1e6 * here, "other_us": 1e6 * there, "same_bits": same})
        bits = "" if same else "OTHER BITS"
        print(f"{name:48} {1e6 * here:9.1f} us {1e6 * there:9.1f} us   {here / there:5.3f}  {bits}", flush=True)
        if options.out:
            content = {"device": options.device, "rows": rows}
            options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
