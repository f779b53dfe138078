"""What the host takes for tiny calls on a CPU in two checkouts: Python's work, as nothing else is large.

    python scripts/host_time.py ../before/src src --rounds 9

Each checkout has a process of its own with one thread. They take turns call by call, the other one first in every other
round, and `import deltazoo` has new processes each time. Times are CPU time, which does not count what else the machine
does: the least of some calls. Medians of all rounds and their ratio, and the range of the middle half of the rounds'
own ratios; above 1 the new checkout is slower. A checkout against itself shows the noise. Uses public names that stay.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

SECONDS = 0.25
"""Of calls per answer; the least of them counts."""
IMPORT = "import time; t = time.process_time(); import deltazoo; print(1e6 * (time.process_time() - t))"
TOKENS = 16
LAYERS = ["linear_attention", "full_attention"]


def calls() -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Name, how many of what it names a call makes, and the call."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import deltazoo

    def rule(backend: str) -> torch.Tensor:
        return deltazoo.delta_rule(*wanted, log_decay, backend=backend).output

    def gradients(backend: str) -> Any:
        return torch.autograd.grad(rule(backend).sum(), wanted)

    q, k, v = torch.rand(3, 1, 8, 2, 16)
    beta, log_decay = torch.rand(1, 8, 2), -torch.rand(1, 8, 2)
    wanted = [x.requires_grad_() for x in (q, k, v, beta)]
    for backend in ("reference", "chunkwise"):
        yield f"delta_rule, {backend}: forward", 1, torch.no_grad()(partial(rule, backend))
        yield f"delta_rule, {backend}: with backward", 1, partial(gradients, backend)

    x = torch.rand(1, 8, 32)
    for name in ("DeltaNet", "GatedDeltaNet", "KimiDeltaAttention"):
        yield f"{name}: forward", 1, torch.no_grad()(partial(getattr(deltazoo, name)(32, 2, 16, layer_idx=0), x))

    def tiny(kind: str, **sizes: Any) -> Any:
        config = AutoConfig.for_model(kind, hidden_size=32, num_hidden_layers=2, vocab_size=64, **sizes)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    def train() -> None:
        trained(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    trained, model = (tiny("gated_deltanet", num_heads=2) for _ in range(2))
    tokens, optimizer = torch.arange(8)[None], torch.optim.AdamW(trained.train().parameters())
    yield "model of 2 layers: training step", 1, train
    long = dict(max_new_tokens=TOKENS)
    yield "deltazoo.generate: one token", TOKENS, partial(deltazoo.generate, model, tokens, **long)
    yield "model.generate: one token", TOKENS, partial(model.generate, tokens, do_sample=False, **long)

    heads = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
    swapped = tiny("llama", **heads)
    deltazoo.swap_attention(swapped, "gated_deltanet")
    yield "swapped llama: forward", 1, torch.no_grad()(partial(swapped, tokens))
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16)
    native = tiny("qwen3_next", head_dim=8, mlp_only_layers=[0, 1], layer_types=LAYERS, **heads, **linear)
    deltazoo.accelerate(native)
    yield "accelerated qwen3_next: forward", 1, torch.no_grad()(partial(native, tokens))


def serve() -> None:
    """Answer each line of standard input, a number, with that call's name and microseconds."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    known = list(calls())
    for line in sys.stdin:
        name, count, call = known[int(line) % len(known)]
        call()
        times = []
        while len(times) < 3 or sum(times) < SECONDS:
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
        print(f"\x00{json.dumps([name, 1e6 * min(times) / count, len(known)])}", flush=True)


class Checkout:
    def __init__(self, source: str) -> None:
        self.environment = os.environ | {"PYTHONPATH": str(Path(source).resolve()), "OMP_NUM_THREADS": "1"}
        command, pipe = [sys.executable, __file__, "--serve"], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=self.environment)

    def ask(self, number: int) -> tuple[str, float, int]:
        assert self.process.stdin and self.process.stdout
        print(number, file=self.process.stdin, flush=True)
        return json.loads(next(line for line in self.process.stdout if line.startswith("\x00"))[1:])

    def time_import(self) -> float:
        command = [sys.executable, "-c", IMPORT]
        return float(subprocess.run(command, stdout=subprocess.PIPE, env=self.environment, check=True).stdout)


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs=2, metavar=("OLD_SRC", "NEW_SRC"), help="the folders that hold deltazoo/")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    pair = [Checkout(source) for source in options.sources]
    times: dict[str, tuple[list[float], list[float]]] = {"import deltazoo": ([], [])}
    _, _, count = [checkout.ask(0) for checkout in pair][0]
    for i in range(options.rounds):
        order = ((0, 1), (1, 0))[i % 2]
        for side in order:
            times["import deltazoo"][side].append(pair[side].time_import())
        for number, side in product(range(count), order):
            name, found, _ = pair[side].ask(number)
            times.setdefault(name, ([], []))[side].append(found)
    rows = []
    print(f"{'microseconds of CPU time per call':40} {'old':>10} {'new':>10}   ratio   middle half")
    for name, (olds, news) in times.items():
        old, new = median(olds), median(news)
        low, _, high = quantiles([b / a for a, b in zip(olds, news, strict=True)], n=4, method="inclusive")
        rows.append({"call": name, "old_us": old, "new_us": new, "ratio": new / old, "middle_half": [low, high]})
        print(f"{name:40} {old:10.1f} {new:10.1f}   {new / old:.3f}   {low:.3f} to {high:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"rounds": options.rounds, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
