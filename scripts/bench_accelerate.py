"""Tokens per second of transformers' delta-rule models before and after `deltazoo.accelerate`.

    python scripts/bench_accelerate.py                          # real widths, on a GPU
    python scripts/bench_accelerate.py --device cpu --small     # a quick try on a CPU

Four layers of each model (three of delta rule and one of softmax attention) with the widths of its configuration's
defaults, random weights, dense MLPs in place of experts, and a small vocabulary, so that neither routing nor the head
hides the layers. Measured in eager mode, before and after in turns: a prompt (forward into a new cache), training
(forward and backward), training on packed documents (transformers' own torch code cannot do that, so there is no
"before"), and one-token steps after a prompt. Writes a JSON file with the machine, the versions and the commit, after
every family, and prints its table.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import deltazoo
from deltazoo.workbench.bench.timing import Timer, timer_for
from deltazoo.workbench.provenance import describe_run

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ["linear_attention"] * 3 + ["full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"mlp_only_layers": [0, 1, 2, 3]},
    "qwen3_5_text": {},
    "olmo_hybrid": {},
    "kimi_linear": {"mlp_layer_types": ["dense"] * 4},
}
COMMON = {
    "num_hidden_layers": 4,
    "layer_types": LAYERS,
    "vocab_size": 32768,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
SMALL_KDA = {"linear_num_heads": 4, "linear_head_dim": 64, "kv_lora_rank": 64}
SMALL_GDN = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
ROUNDS = 3
PHASES = ["prompt", "training", "packed training", "step"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--small", action="store_true", help="narrow models, for a quick try")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--plain", action="store_true", help="accelerate(model, fused_kernels=False)")
    parser.add_argument("--batch", type=int, default=1, help="rows (default: 1)")
    parser.add_argument("--tokens", type=int, help="tokens per row (default: 4096, small: 512)")
    parser.add_argument("--commit", help="of the code; read from git unless given")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/accelerate_DEVICE[_small][_plain].json")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no NVIDIA GPU here; try --device cpu --small", file=sys.stderr)
        return 1
    batch, tokens = args.batch, args.tokens or (512 if args.small else 4096)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    suffix = "_small" * args.small + "_plain" * args.plain
    out = args.out or ROOT / "benchmarks" / "results" / f"accelerate_{args.device}{suffix}.json"

    run = describe_run(device=args.device, commit=args.commit, command=sys.argv[1:])
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for family in args.families:
        if family not in CONFIG_MAPPING:
            print(f"transformers {version('transformers')} has no {family}: left out", file=sys.stderr)
            continue
        config = make_config(family, args.small)
        rows += measure_family(config, batch, tokens, torch.device(args.device), dtype, False if args.plain else None)
        out.write_text(json.dumps({"run": asdict(run), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    Console(width=110).print(table(rows))
    print(out)
    return 0


def make_config(family: str, small: bool) -> Any:
    options = {**COMMON, **FAMILIES[family]}
    if small:
        options |= SMALL | (SMALL_KDA if family == "kimi_linear" else SMALL_GDN)
    return AutoConfig.for_model(family, **options)


def measure_family(
    config: Any, batch: int, tokens: int, device: torch.device, dtype: torch.dtype, fused_kernels: bool | None
) -> list[dict[str, Any]]:
    """One row per phase, with tokens per second before and after."""
    torch.manual_seed(0)
    with device:  # initialising half a billion weights takes a CPU most of a minute
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    ids = torch.randint(3, config.vocab_size, (batch, tokens), device=device)
    timer = timer_for(str(device))
    sizes = {"model": config.model_type, "hidden_size": config.hidden_size, "batch": batch, "tokens": tokens}
    sizes |= {"parameters": sum(p.numel() for p in model.parameters()), "dtype": str(dtype).removeprefix("torch.")}

    results = {phase: {"before": [], "after": []} for phase in PHASES}
    sizes |= {"fused_kernels": fused_kernels}
    report = deltazoo.accelerate(model, fused_kernels=fused_kernels)
    for _ in range(ROUNDS):  # in turns, so that a slow minute of the machine slows both
        deltazoo.restore(model)
        measure(model, ids, timer, results, "before")
        deltazoo.accelerate(model, fused_kernels=fused_kernels)
        measure(model, ids, timer, results, "after")
    return [
        {**sizes, "phase": phase, "backend": report.layers[0].backend, **{k: summary(v) for k, v in result.items()}}
        for phase, result in results.items()
    ]


def measure(model: Any, ids: torch.Tensor, timer: Timer, results: dict[str, dict[str, list]], when: str) -> None:
    """Add one sample per phase: tokens per second and peak memory, or why there is none."""
    for phase, call, tokens in calls(model, ids, packed=when == "after"):
        try:
            sample = {"tokens_per_s": 1000 * tokens / timer.milliseconds(call).median}
            if ids.is_cuda:
                sample["peak_mib"] = timer.peak_mib(call)
        except torch.OutOfMemoryError as error:
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            sample = {"error": f"out of memory: {str(error).splitlines()[0]}"}
        results[phase][when].append(sample)


def summary(samples: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Median, least and most over the rounds."""
    failed = [sample for sample in samples if "error" in sample]
    if not samples or failed:
        return failed[0] if failed else None
    speeds = [sample["tokens_per_s"] for sample in samples]
    result = {"tokens_per_s": statistics.median(speeds), "low": min(speeds), "high": max(speeds)}
    return result | ({"peak_mib": samples[-1]["peak_mib"]} if "peak_mib" in samples[-1] else {})


def calls(model: Any, ids: torch.Tensor, *, packed: bool) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Every phase with what to call and how many tokens a call takes."""

    def prompt() -> Any:
        return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    def train(**packing: Any) -> None:
        rows = ids.reshape(1, -1) if packing else ids
        model(input_ids=rows, labels=rows, use_cache=False, **packing).loss.backward()
        model.zero_grad(set_to_none=True)

    with inference(model):
        yield "prompt", prompt, ids.numel()
    yield "training", train, ids.numel()
    if packed:
        lengths = document_lengths(ids.numel())
        positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])[None]
        yield "packed training", lambda: train(position_ids=positions), ids.numel()
    with inference(model):
        cache, token = prompt(), ids[:, :1]
        yield "step", lambda: model(input_ids=token, past_key_values=cache), ids.shape[0]


@contextmanager
def inference(model: Any) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def document_lengths(total: int) -> list[int]:
    """Documents of 64 to 2,048 tokens that fill the row."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(2 ** torch.empty(1).uniform_(6, 11, generator=generator))))
    return lengths


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title="tokens per second")
    for column in ("model", "phase", "batch x tokens", "before", "after", "times", "backend"):
        result.add_column(column, justify="right" if column in ("before", "after", "times") else "left", no_wrap=True)
    for row in rows:
        before, after = (figure(row[when]) for when in ("before", "after"))
        times = f"{after / before:.2f}" if isinstance(before, float) and isinstance(after, float) else ""
        shown = [f"{x:,.0f}" if isinstance(x, float) else x for x in (before, after)]
        result.add_row(row["model"], row["phase"], f"{row['batch']} x {row['tokens']}", *shown, times, row["backend"])
    return result


def figure(result: dict[str, Any] | None) -> float | str:
    return "" if result is None else result.get("tokens_per_s", "no memory")


if __name__ == "__main__":
    sys.exit(main())
