"""Captured training steps beside eager ones and beside one graph of the whole step, written by hand.

    python -m benchmarks.captured_training --out run.json
    python -m benchmarks.captured_training --out run.json --device cpu --shapes 1x32 --steps 2

Recipes: `loop` has bfloat16 weights, no clipping. `trainer` is transformers' Trainer as our presets train: float32
weights under autocast, clipping; `nan-filter` with its NaN check, which waits for the GPU in every step. `whole` is the
same by hand. Measured: train_tok_s; train_peak_gib and train_reserved_gib, of tensors and of all that torch holds.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

import deltazoo
from benchmarks.common import Results, Row, now, options
from benchmarks.models import SIZES, candidates, clear

WARM_UP = 6  # steps, of which the third is captured


def by_hand(model: Any, tokens: Tensor, recipe: str, steps: int, whole: bool) -> float:
    """Seconds per step of a loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=whole)

    def step() -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=recipe != "loop"):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if recipe != "loop":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    stream = torch.cuda.Stream() if whole else None
    with torch.cuda.stream(stream):  # type: ignore[arg-type]
        for _ in range(WARM_UP):
            step()
    if whole:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        step = graph.replay  # type: ignore[assignment]
    began = now(tokens.device.type)
    for _ in range(steps):
        step()
    return (now(tokens.device.type) - began) / steps


def by_trainer(model: Any, rows: Tensor, batch: int, steps: int, device: str, nan_filter: bool) -> float:
    """Seconds per step of transformers' Trainer."""
    times: dict[int, float] = {}

    class Clock(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step in (WARM_UP, WARM_UP + steps):
                times[state.global_step] = now(device)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=batch, max_steps=WARM_UP + steps, logging_steps=1000, report_to=[],
            save_strategy="no", disable_tqdm=True, logging_nan_inf_filter=nan_filter, use_cpu=device == "cpu",
            bf16=device != "cpu",
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    return (times[WARM_UP + steps] - times[WARM_UP]) / steps


def measure(model: Any, recipe: str, way: str, shape: str, steps: int, device: str) -> dict[str, Row]:
    """Rows by the name of the measure."""
    batch, length = map(int, shape.split("x"))
    if hasattr(model, "set_runtime"):
        model.set_runtime(captured_training="auto" if way == "captured" else False)
    rows = torch.randint(0, model.config.vocab_size, (batch * (WARM_UP + steps), length))
    if recipe == "loop" or way == "whole":
        seconds = by_hand(model, rows[:batch].to(device), recipe, steps, way == "whole")
    else:
        seconds = by_trainer(model, rows, batch, steps, device, recipe == "nan-filter")
    found: dict[str, Row] = {"train_tok_s": {"value": batch * length / seconds, "ms": 1e3 * seconds}}
    if way == "captured":
        found["train_tok_s"]["report"] = deltazoo.report(model).captured
    if device != "cpu":
        found["train_peak_gib"] = {"value": torch.cuda.max_memory_allocated() / 2**30}
        found["train_reserved_gib"] = {"value": torch.cuda.max_memory_reserved() / 2**30}
        torch.cuda.reset_peak_memory_stats()
    return found


def main() -> int:
    """Command line; exit status 1 if a measurement failed."""
    parser = options(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["1x512", "1x2048", "2x4096", "8x4096"], help="ROWSxTOKENS")
    parser.add_argument("--recipes", nargs="+", default=["loop", "trainer", "nan-filter"])
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    arguments = parser.parse_args()
    results, device, ways = Results(arguments), arguments.device, ("eager", "captured", "whole")
    found = candidates(SIZES["quickstart" if device == "cpu" else "340m"], ["gated_deltanet"], ["llama"])
    for candidate, recipe, shape, way in product(found, arguments.recipes, arguments.shapes, ways):
        if (candidate.library != "deltazoo" and way == "captured") or (device == "cpu" and way == "whole"):
            continue
        setting = {"model": candidate.model, "recipe": recipe, "shape": shape, "way": way}
        try:
            with torch.device(device):
                model = candidate.build().to(torch.bfloat16 if recipe == "loop" else torch.float32).train()
            for name, row in measure(model, recipe, way, shape, arguments.steps, device).items():
                results.add({**setting, "measure": name}, row)
        except Exception as error:  # the peer may refuse to be captured
            results.fail({**setting, "measure": "train_tok_s"}, error)
        model = None
        clear()
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
