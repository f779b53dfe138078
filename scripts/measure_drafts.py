"""Tokens per second of `generate` with a draft model and with prompt lookup, against without. Meant for a GPU.

    python scripts/measure_drafts.py --out benchmarks/results/drafts_h200.json --commit $(git rev-parse HEAD)

Random weights accept no draft but their own. So a target and a draft of an eighth of its layers are trained for some
seconds on the bytes of Python's standard library, and continue files that neither has seen: one row, greedy, in
bfloat16. `tokens_per_pass` is what decides: new tokens per forward pass of the target, one without a draft.
`rollback_ms` is what the target's cache takes to forget 3 tokens of a call of 6, beside that call itself.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deltazoo
from deltazoo.generation import record, rollback
from deltazoo.layers import parameter_groups
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM
from deltazoo.workbench.bench.result_files import write_results
from deltazoo.workbench.bench.timing import now
from deltazoo.workbench.provenance import describe_run

PROMPT = 512
"""Bytes of a file that come before what is generated."""


def library_bytes(held_out: int) -> tuple[Tensor, list[Tensor]]:
    """The bytes of the standard library without its tests, and the beginnings of some files that are left out."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.glob("**/*.py") if not {"test", "tests", "site-packages"} & {*path.parts})
    texts = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in files if path.stat().st_size]
    long = [number for number, text in enumerate(texts) if len(text) > 4 * PROMPT]
    chosen = long[:: max(1, len(long) // held_out)][:held_out]
    return torch.cat([text for number, text in enumerate(texts) if number not in chosen]), [
        texts[number][:PROMPT].long()[None] for number in chosen
    ]


def model_of(layers: int, width: int, device: str) -> DeltaRuleForCausalLM:
    """A Gated DeltaNet over bytes."""
    head_dim = min(128, width // 2)
    config = DeltaRuleConfig(
        mixer="gated_deltanet",
        vocab_size=256,
        hidden_size=width,
        num_hidden_layers=layers,
        num_heads=width // head_dim,
        head_dim=head_dim,
        expand_v=1.0,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return DeltaRuleForCausalLM(config)


def train(model: DeltaRuleForCausalLM, text: Tensor, rows: int, length: int, seconds: float) -> dict[str, float]:
    """Train for some seconds after the first step; the loss at the end, in bits per byte over the last ten steps."""
    device, losses, began = model.device, [], 0.0
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    model.train()
    for step in count():
        share = (time.monotonic() - began) / seconds if began else 0.0
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))
        starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
        batch = text[starts + torch.arange(length)].long().to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if not began:
            loss.item()  # kernels are compiled
            began = time.monotonic()
        elif step % 8 == 0:
            loss.item()
    bits = torch.stack(losses[-10:]).mean().item() / math.log(2)
    return {"steps": len(losses), "bytes": len(losses) * rows * length, "bits_per_byte": bits}


def ways(draft: DeltaRuleForCausalLM) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments of `generate` by name."""
    yield "plain", {"capture_step": False}
    yield "captured", {}
    yield "prompt_lookup", {"prompt_lookup_num_tokens": 8}
    yield "draft", {"assistant_model": draft}


@torch.no_grad()
def speeds(
    target: DeltaRuleForCausalLM, draft: DeltaRuleForCausalLM, prompts: list[Tensor], new_tokens: int
) -> Iterator[dict[str, Any]]:
    """One row per way of decoding, medians over the prompts."""
    passes = 0

    def count_pass(*args: Any) -> None:
        nonlocal passes
        passes += 1

    expected: list[Tensor] = []
    for name, options in [*ways(draft), ("deltazoo.generate", None)]:
        rates, per_pass, equal = [], [], 0
        _generate(target, prompts[0], 16, options)  # kernels are compiled
        for number, prompt in enumerate(prompts):
            passes = 0
            hook = target.register_forward_pre_hook(count_pass) if name in ("prompt_lookup", "draft") else None
            began = now(target.device)
            made = _generate(target, prompt, new_tokens, options)
            seconds = now(target.device) - began
            if hook is not None:
                hook.remove()
            if name == "plain":
                expected.append(made)
            equal += torch.equal(made, expected[number])
            rates.append(new_tokens / seconds)
            per_pass.append(new_tokens / passes if passes else 1.0)
        yield {
            "way": name,
            "tokens_per_second": statistics.median(rates),
            "slowest": min(rates),
            "fastest": max(rates),
            "tokens_per_pass": statistics.median(per_pass),
            "equal_to_plain": f"{equal} of {len(prompts)}",
        }


def _generate(model: DeltaRuleForCausalLM, prompt: Tensor, new_tokens: int, options: dict[str, Any] | None) -> Tensor:
    if options is None:
        return deltazoo.generate(model, prompt, max_new_tokens=new_tokens)
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options)


@torch.no_grad()
def rollback_times(target: DeltaRuleForCausalLM, prompt: Tensor, repeats: int) -> dict[str, float]:
    """Milliseconds of a call of 6 tokens, and of taking 3 of them back."""
    cache = target(prompt, use_cache=True).past_key_values
    record(cache)
    times: dict[str, list[float]] = {"call_ms": [], "rollback_ms": []}

    def timed(name: str, function: Callable[[], Any]) -> None:
        began = now(target.device)
        function()
        times[name].append(1e3 * (now(target.device) - began))

    for _ in range(repeats):
        timed("call_ms", lambda: target(prompt[:, :6], past_key_values=cache))
        timed("rollback_ms", lambda: rollback(cache, 3))
    return {name: statistics.median(found[len(found) // 4 :]) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="read from git unless given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=16, help="of the target")
    parser.add_argument("--width", type=int, default=768, help="of the target; of the draft two thirds")
    parser.add_argument("--rows", type=int, default=16, help="of a training step")
    parser.add_argument("--length", type=int, default=2048, help="bytes of a row")
    parser.add_argument("--seconds", type=float, default=12.0, help="of training of the target; of the draft a third")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=192)
    args = parser.parse_args()

    text, prompts = library_bytes(args.prompts)
    prompts = [prompt.to(args.device) for prompt in prompts]
    sizes = {"target": (args.layers, args.width, 1.0), "draft": (max(1, args.layers // 8), args.width * 2 // 3, 1 / 3)}
    models, training = {}, {}
    for name, (layers, width, share) in sizes.items():
        model = model_of(layers, width, args.device)
        trained = train(model, text, args.rows, args.length, share * args.seconds)
        training[name] = {"layers": layers, "width": width, "parameters": model.num_parameters(), **trained}
        models[name] = model.eval().to(torch.bfloat16)
        print(name, training[name], flush=True)
    generation: Any = models["draft"].generation_config
    generation.num_assistant_tokens, generation.num_assistant_tokens_schedule = 5, "constant"
    generation.assistant_confidence_threshold = 0.0
    run = describe_run(device=args.device, commit=args.commit, command=[])
    taken_back = rollback_times(models["target"], prompts[0], 20)
    print(taken_back, flush=True)
    rows = []
    for row in speeds(models["target"], models["draft"], prompts, args.new_tokens):
        rows.append(row)
        print(row, flush=True)
        write_results(args.out, run, training=training, rows=rows, rollback=taken_back)


if __name__ == "__main__":
    main()
