"""Training steps of the presets of transformers' own classes, on our operators and on transformers' own code.

    python scripts/bench_native_training.py                        # on an NVIDIA GPU
    python scripts/bench_native_training.py --device cpu --small   # a quick try on a CPU

A step is forward, backward, clipping and AdamW, as `deltazoo train` runs it: bfloat16 autocast over float32 weights,
random tokens, rows of the preset's length. Three ways, each with a model of its own:

* `packed`: accelerated, several documents in each row.
* `whole`: accelerated, one document in each row.
* `transformers`: whole rows without `deltazoo.accelerate`. transformers' own code does not keep packed documents apart.

flash-linear-attention is hidden from transformers unless `--fla` is given. Writes a JSON file after every model.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PRESETS = ("qwen3_5_text_340m", "olmo_hybrid_340m")
WAYS = ("packed", "whole", "transformers")
WARM_UP = 2
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}
SMALL |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
SMALL |= {"linear_value_head_dim": 16, "max_position_embeddings": 128}


class Vocabulary:
    """What building a model asks of a tokenizer: as many entries as the presets' has, and special tokens."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 2

    def __len__(self) -> int:
        return 32_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--small", action="store_true", help="narrow models and short rows, for a quick try")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=PRESETS, metavar="PRESET")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY")
    parser.add_argument("--rows", type=int, help="rows of a step (default: rows_per_batch of the preset, small: 2)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps (default: 5)")
    parser.add_argument("--fla", action="store_true", help="let transformers use flash-linear-attention if it is there")
    parser.add_argument("--commit", help="of the code; read from git unless given")
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/results/native_training_DEVICE[_small][_fla].json"
    )
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no NVIDIA GPU here; try --device cpu --small", file=sys.stderr)
        return 1
    if not args.fla:
        sys.modules["fla"] = None  # type: ignore[assignment]  # importing it fails, and transformers takes its own code

    from benchmarks.provenance import describe_run
    from benchmarks.result_files import write_results

    suffix = "_small" * args.small + "_fla" * args.fla
    out = args.out or RESULTS / f"native_training_{args.device}{suffix}.json"
    run = describe_run(device=args.device, commit=args.commit, command=sys.argv[1:])
    rows = []
    for preset in args.presets:
        for way in args.ways:
            rows.append(measure(preset, way, torch.device(args.device), args.rows, args.steps, small=args.small))
            rows[-1]["fla"] = args.fla
            print(json.dumps(rows[-1]), flush=True)
            write_results(out, run, rows=rows)
    Console(width=120).print(table(rows))
    print(out)
    return 0


def measure(preset: str, way: str, device: torch.device, num_rows: int | None, steps: int, *, small: bool) -> dict:
    """Tokens per second (median, least, most), peak memory and losses of some training steps."""
    import deltazoo
    from deltazoo.layers import parameter_groups
    from deltazoo.training import load_config
    from deltazoo.training.model import build_model
    from deltazoo.training.presets import presets

    config = load_config(presets()[preset])
    settings = config.training
    length = 128 if small else settings.row_length
    num_rows = num_rows or (2 if small else settings.rows_per_batch)
    gc.collect()  # the model before
    torch.manual_seed(0)
    with device:
        model: Any = build_model(config.model | SMALL if small else config.model, Vocabulary(), config.runtime)
    if way == "transformers":
        deltazoo.restore(model)
    model.train()
    result = {"preset": preset, "way": way, "rows": num_rows, "row_length": length, "precision": "bf16"}
    result["parameters"] = model.num_parameters()
    groups = parameter_groups(model, settings.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)
    batch = {name: x.to(device) for name, x in make_batch(num_rows, length, packed=way == "packed").items()}

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for the device

    try:
        losses = [step() for _ in range(WARM_UP)]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            losses.append(step())
            seconds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError as error:
        return result | {"error": f"out of memory: {str(error).splitlines()[0]}"}
    speeds = sorted(num_rows * length / each for each in seconds)
    result |= {"tokens_per_s": statistics.median(speeds), "low": speeds[0], "high": speeds[-1], "losses": losses}
    if device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def make_batch(num_rows: int, length: int, *, packed: bool) -> dict[str, torch.Tensor]:
    """Random tokens in rows, packed as `deltazoo train` packs them, or with one document in each row."""
    from deltazoo.training.packed_rows import collate_side_by_side

    generator = np.random.default_rng(0)
    rows = []
    for _ in range(num_rows):
        starts = {0}
        while packed and (start := max(starts) + int(2 ** generator.uniform(5, 10))) < length:
            starts.add(start)
        ids = generator.integers(3, len(Vocabulary()), length)
        rows.append({"input_ids": ids, "starts": np.array(sorted(starts))})
    batch = collate_side_by_side(rows)
    return batch if packed else {name: x for name, x in batch.items() if name != "position_ids"}


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title="training steps")
    for column in ("preset", "way", "rows", "tokens/s", "peak GiB", "losses"):
        result.add_column(column, no_wrap=True)
    for row in rows:
        speed = row.get("error") or f"{row['tokens_per_s']:,.0f} ({row['low']:,.0f} to {row['high']:,.0f})"
        losses = " ".join(f"{loss:.2f}" for loss in row.get("losses", [])[:: len(row.get("losses", [])) - 1 or 1])
        peak = f"{row['peak_gib']:.1f}" if "peak_gib" in row else ""
        result.add_row(row["preset"], row["way"], f"{row['rows']} x {row['row_length']:,}", speed, peak, losses)
    return result


if __name__ == "__main__":
    sys.exit(main())
