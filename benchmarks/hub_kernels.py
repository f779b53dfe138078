"""transformers' models on the layers of the kernel hub's folder, beside their own torch code.

    python -m benchmarks.hub_kernels --out benchmarks/results/hub_kernels_h200.json
    python -m benchmarks.hub_kernels --out run.json --device cpu --small               # a quick try on a CPU

Needs a version of `kernels` that fits transformers. The folder is built by `scripts/hub_kernel.py` and loaded from its
path, on a GPU by the names of its layers. Four layers with the widths of the configuration's defaults and random
weights, as in `benchmarks.accelerate`:

    results     float32: the largest difference of the logits of two rows, how far both are from those of the layers in
                float64 (norms and gates stay in float32), and whether greedy text is the same
    forward     milliseconds of a forward pass without gradients, in bfloat16 on a GPU; median of rounds in turns
    training    forward and backward
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernels import LocalLayerRepository
from transformers import KernelConfig
from transformers.integrations.hub_kernels import kernelize

from benchmarks.accelerate import Phase, make_model, measured
from benchmarks.common import Results, Row, options, package_version
from scripts.hub_kernel import build

RULES = {
    "qwen3_5_text": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"],
    "kimi_linear": ["chunk_kda", "fused_recurrent_kda"],
}
AROUND = ["causal_conv1d_fn", "causal_conv1d_update", "RMSNormGated"]
ROUNDS = 3
NEW_TOKENS = 16


def attach(model: Any, folder: Path, names: list[str]) -> None:
    """Replace the functions of transformers by layers of the folder; without names, put them back."""
    training = model.training
    if model.device.type == "cuda" and names:
        config = KernelConfig({name: f"{folder}:{name}" for name in names}, use_local_kernel=True)
        model.train().set_use_kernels(True, config)
    else:
        local: dict[str, Any] = {name: {"cpu": LocalLayerRepository(folder, layer_name=name)} for name in names}
        model.kernel_config = KernelConfig(local, use_local_kernel=True)
        kernelize(model.train())
    model.train(training)


def results_of(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the rows, and tokens after them."""
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        return logits, model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)


def compare(results: Results, setting: Row, model: Any, folder: Path, names: list[str], tokens: int) -> None:
    ids = torch.randint(3, model.config.vocab_size, (2, tokens), device=model.device)
    before = results_of(model.eval(), ids)
    attach(model, folder, names)
    after = results_of(model, ids)
    with torch.no_grad():
        exact = model.double()(ids, use_cache=False).logits
    attach(model.float(), folder, [])
    found: Row = {"logits": largest(before[0] - after[0]), "largest_logit": largest(exact)}
    found |= {"torch_error": largest(before[0] - exact), "layers_error": largest(after[0] - exact)}
    found["same_text"] = torch.equal(before[1], after[1])
    results.add({**setting, "measure": "results", "batch": 2, "tokens": tokens, "dtype": "float32"}, found)


def largest(x: torch.Tensor) -> float:
    return x.abs().max().item()


def measure(results: Results, setting: Row, model: Any, folder: Path, names: list[str], tokens: int) -> None:
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), device=model.device)
    setting = {**setting, "batch": 1, "tokens": tokens, "dtype": str(model.dtype).removeprefix("torch.")}

    def forward() -> None:
        with torch.no_grad():
            model.eval()(ids, use_cache=False, logits_to_keep=1)

    def train() -> None:
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    calls: dict[str, Callable[[], object]] = {"forward": forward, "training": train}
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):  # in turns, so that a slow minute of the machine slows both
        for kind, attached in (("torch", []), ("layers", names)):
            attach(model, folder, attached)
            for name, call in calls.items():
                speed = measured(Phase(name, call, tokens), model.device)["tokens_per_s"]
                samples.setdefault((name, kind), []).append(1e3 * tokens / speed)
    for name in calls:
        found = {f"{kind}_ms": statistics.median(samples[name, kind]) for kind in ("torch", "layers")}
        ranges = {f"{kind}_range_ms": sorted(samples[name, kind])[:: ROUNDS - 1] for kind in ("torch", "layers")}
        results.add({**setting, "measure": name}, {**found, **ranges, "parameters": model.num_parameters()})


def main() -> int:
    """Command line; exit status 1 if a measurement failed."""
    parser = options(__doc__)
    parser.add_argument("--small", action="store_true", help="narrow models, for a quick try")
    parser.add_argument("--families", nargs="+", default=list(RULES), choices=list(RULES), metavar="FAMILY")
    parser.add_argument("--measure", nargs="+", default=["results", "times"], choices=["results", "times"])
    arguments = parser.parse_args()
    device, results = torch.device(arguments.device), Results(arguments)
    results.run["kernels"] = package_version("kernels")
    torch.backends.cudnn.allow_tf32 = False  # float32 convolutions of torch are otherwise rounded to 10 bits
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "deltazoo-kernels"
        build(folder)
        for family in arguments.families:
            setting, names = {"model": family, "layers": 4}, [*RULES[family], *AROUND]
            model = make_model(family, arguments.small, device, torch.float32)
            setting["hidden_size"] = model.config.hidden_size
            if "results" in arguments.measure:
                compare(results, setting, model, folder, names, 100 if arguments.small else 512)
            if "times" in arguments.measure:
                measure(results, setting, model.to(dtype), folder, names, 256 if arguments.small else 4096)
            del model
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
