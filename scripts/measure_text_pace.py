"""Speed and memory of training steps of the suite `text`, to fix its batch and to plan a session.

    python scripts/measure_text_pace.py --device cuda:0 --configurations gated_deltanet,kda,softmax --rows 16,32,64

One line per configuration and number of rows: tokens per second, milliseconds of a step until it is done and until the
host has launched it, peak memory, seconds of the first step, in which kernels are compiled. The two times tell whether
the GPU waits for the host. `--passes 2` runs a step as two forward and backward passes; `--compile` runs torch.compile.
"""

import argparse
import time
import traceback
from dataclasses import dataclass

import torch

from deltazoo.layers import parameter_groups
from deltazoo.workbench.bench.timing import now
from deltazoo.workbench.lab.text.text_configurations import build_model
from deltazoo.workbench.lab.text.text_recipe import TextRecipe
from deltazoo.workbench.lab.text.training import autocast

VOCABULARY = 8192
CONFIGURATIONS = "gated_deltanet,kda,softmax,delta_net,eda,gated_deltanet2"


@dataclass(frozen=True)
class Way:
    """How a step is run."""

    rows: int
    row_length: int
    passes: int
    compiled: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--configurations", default=CONFIGURATIONS)
    parser.add_argument("--rows", default=str(TextRecipe.rows_per_step))
    parser.add_argument("--row-length", type=int, default=TextRecipe.row_length)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    for configuration in arguments.configurations.split(","):
        for rows in map(int, arguments.rows.split(",")):
            way = Way(rows, arguments.row_length, arguments.passes, arguments.compile)
            try:
                pace = measure(configuration, way, torch.device(arguments.device), arguments.steps)
                print(f"{configuration} {way}: {pace}", flush=True)
            except Exception:  # one configuration that fails must not cost the others their time on the GPU
                print(f"{configuration} {way}: FAILED\n{traceback.format_exc(limit=-3)}", flush=True)


def measure(configuration: str, way: Way, device: torch.device, steps: int) -> str:
    recipe, on_gpu = TextRecipe(), device.type == "cuda"
    if on_gpu:
        torch.cuda.init()  # before it, memory has no statistics
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    with torch.device(device):
        # Compiled code computes all logits unless told otherwise.
        runtime = {"fuse_linear_cross_entropy": True} if way.compiled else {}
        model = build_model(configuration, recipe, VOCABULARY, **runtime).train()
        tokens = torch.randint(VOCABULARY, (way.rows, way.row_length + 1))
    forward = torch.compile(model) if way.compiled else model
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe.weight_decay), lr=1e-3, fused=True)

    def step() -> None:
        for part in tokens.chunk(way.passes):
            with autocast(device):
                inputs = {"input_ids": part[:, :-1], "labels": part[:, :-1], "shift_labels": part[:, 1:]}
                loss = forward(**inputs, use_cache=False).loss
            (loss / way.passes).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    began = now(device)
    step()
    first = now(device) - began
    step()
    step()
    began = now(device)
    for _ in range(steps):
        step()
    launched, done = time.perf_counter() - began, now(device) - began
    gib = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else float("nan")
    speed = way.rows * way.row_length * steps / done
    return (
        f"{speed:,.0f} tokens/s, {1e3 * done / steps:.1f} ms, launched in {1e3 * launched / steps:.1f} ms, "
        f"{gib:.1f} GiB, first step {first:.1f} s"
    )


if __name__ == "__main__":
    main()
