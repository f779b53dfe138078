"""Run by test_context_parallel.py under torchrun: sequences that 1, 2, 3 and 4 ranks share.

    torchrun --nproc-per-node 4 tests/distributed/context_worker.py FOLDER operators models errors

Rank 0 writes FOLDER/results.json: by check, what it found. With CUDA every rank has a GPU, and the operator's kernels
run on it.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).parents[1]))
from foreign_models import foreign_model
from one_thread_gloo import ONE_THREAD_GLOO
from tiny_families import tiny_original
from tiny_models import tiny_model

import deltazoo
from deltazoo.layers import DeltaRuleAttention
from deltazoo.ops import ContextParallel, delta_rule

GPU = torch.cuda.is_available()
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", RANK) if GPU else torch.device("cpu")
HEAD, SEGMENT = (128, 256) if GPU else (8, 64)

OPERATORS: dict[str, dict[str, Any]] = {
    "no decay": {},
    "decay per head, rows of unequal cells": {"decay": 1, "rows": 2, "tokens": 300},
    "decay per channel": {"decay": 2, "group": 2},
    "packed": {"decay": 1, "documents": [0, 30, 30, 200, 390, 450, 512]},
    "packed, per channel, a document over all ranks": {"decay": 2, "documents": [0, 20, 500, 512]},
    "erase key, undecayed, micro-steps": {"decay": 1, "erase": True, "steps": 2},
    "packed, micro-steps": {"decay": 2, "erase": True, "steps": 2, "documents": [0, 129, 512]},
    "linear attention": {"beta": False, "decay": 1},
    "definition": {"backend": "reference", "decay": 1, "tokens": 256},
}
"""Calls of the operator; tokens count in quarters of the row where they are not given."""


def cuts(tokens: int, degree: int) -> list[int]:
    """Uneven pieces, cut at multiples of the segment length."""
    parts = {1: [], 2: [2], 3: [1, 2], 4: [1, 1, 1]}[degree]
    return [*(part * SEGMENT for part in parts), tokens - sum(parts) * SEGMENT]


def operator_inputs(tokens: int, rows: int, steps: int, decay: int, erase: bool, beta: bool, group: int) -> dict:
    """Arguments of `delta_rule` for the whole sequence, the same on all ranks."""
    random = torch.Generator().manual_seed(0)
    H, HV, K, V = 2, 2 * group, HEAD, HEAD if GPU else 6
    dtype = torch.bfloat16 if GPU else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    k = F.normalize(normal(rows, tokens * steps, H, K), dim=-1)
    inputs = {
        "q": normal(rows, tokens, H, K).to(dtype),
        "k": k.to(dtype),
        "v": normal(rows, tokens * steps, HV, V).to(dtype),
        "beta": torch.rand(rows, tokens * steps, HV, generator=random) if beta else None,
        "log_decay": [None, -0.1 * normal(rows, tokens, HV).abs(), -0.1 * normal(rows, tokens, HV, K).abs()][decay],
        "erase_key": F.normalize(k + 0.1 * normal(*k.shape), dim=-1).to(dtype) if erase else None,
    }
    return {name: x.to(DEVICE) for name, x in inputs.items() if x is not None}


def run_operator(
    context: ContextParallel, lengths: list[int], *, tokens: int = 8 * SEGMENT, rows: int = 1, steps: int = 1,
    decay: int = 0, erase: bool = False, beta: bool = True, group: int = 1, documents: list[int] | None = None,
    backend: str | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Results and gradients of this rank's piece; those of states summed over ranks."""
    whole = operator_inputs(tokens, rows, steps, decay, erase, beta, group)
    begin = sum(lengths[: context.rank])
    end = begin + lengths[context.rank]
    per_token = {name: steps if name in ("k", "v", "beta", "erase_key") else 1 for name in whole}
    piece = {name: x[:, begin * per_token[name] : end * per_token[name]].clone() for name, x in whole.items()}
    bounds = None
    if documents is not None:
        bounds = torch.tensor(documents, device=DEVICE) * tokens // documents[-1]
    sequences = rows if documents is None else len(documents) - 1
    random = torch.Generator().manual_seed(1)
    HV, K, V = whole["v"].shape[2], whole["k"].shape[3], whole["v"].shape[3]
    piece["initial_state"], d_final = (torch.randn(sequences, HV, K, V, generator=random).to(DEVICE) for _ in range(2))
    d_output = torch.randn(rows, tokens, HV, V, generator=random).to(DEVICE, whole["v"].dtype)[:, begin:end]
    for x in piece.values():
        x.requires_grad_()
    update: dict[str, Any] = {"num_micro_steps": steps, "erase_reads": "undecayed"} if erase else {}
    function = delta_rule if beta else deltazoo.linear_attention
    output, final = function(**piece, cu_seqlens=bounds, backend=backend, context=context, **update)
    gradients = torch.autograd.grad((output, final), list(piece.values()), (d_output, d_final))
    found = {"output": output.detach(), "final": final.detach(), **dict(zip(piece, gradients, strict=True))}
    for name in ("final", "initial_state"):
        if context.size > 1:
            dist.all_reduce(found[name], group=context.group)
    return {name: x if name in ("final", "initial_state") else together(x, context, 1) for name, x in found.items()}


def together(x: Tensor, context: ContextParallel, axis: int) -> Tensor:
    """The pieces of all ranks side by side."""
    if context.size == 1:
        return x
    pieces: list[Any] = [None] * context.size
    dist.all_gather_object(pieces, x.cpu(), group=context.group)
    return torch.cat(pieces, axis).to(DEVICE)


def check_operators(groups: dict[int, Any]) -> dict[str, Any]:
    """By case and degree, the results that differ from those of one rank: in any bit, or of torch's sums, by more."""
    found = {}
    for name, options in OPERATORS.items():
        tokens = options.get("tokens", 512) * SEGMENT // 64
        options = {**options, "tokens": tokens}
        alone = run_operator(ContextParallel(segment_length=SEGMENT), [tokens], **options)
        for degree in range(2, SIZE + 1):
            if degree > RANK:
                context = ContextParallel(groups[degree], segment_length=SEGMENT)
                shared = run_operator(context, cuts(tokens, degree), **options)
                same = close if GPU and options.get("backend") == "reference" else torch.equal
                found[f"{name}, {degree}"] = [key for key in alone if not same(alone[key], shared[key])]
    return found


def close(a: Tensor, b: Tensor) -> bool:
    """Equal within the rounding of sums in float32, or of a result in bfloat16."""
    limit = 1e-5 if a.dtype == torch.float32 else torch.finfo(a.dtype).eps
    return bool((a - b).norm() <= limit * a.norm())


def made_model(case: str) -> Any:
    """A tiny model: ours, swapped, or one of transformers' own that is accelerated."""
    torch.manual_seed(0)
    if case == "swapped":
        model = tiny_original("llama")
        deltazoo.swap_attention(model, "kda", [0])
        return model.eval()
    if case == "accelerated":
        model = foreign_model("qwen3_next")
        deltazoo.accelerate(model)
        model.set_experts_implementation("eager")  # the others take no float64
        return model.eval()
    return tiny_model(case).eval()


MODELS = {"kda": "none", "pgdn": "none", "hybrid": "block", "swapped": "none", "accelerated": "none"}
"""Models, and what those of ours compute again."""
TOKENS = 256
DOCUMENTS = [0, 30, 30, 100, 250, 256]


def run_model(model: Any, ids: Tensor, context: ContextParallel | None, lengths: list[int], **given: Any) -> dict:
    """Logits, loss and gradients over all ranks."""
    deltazoo.context_parallel(model, context)
    model.zero_grad()
    rank, size = (0, 1) if context is None else (context.rank, context.size)
    begin = sum(lengths[:rank])
    piece = ids[:, begin : begin + lengths[rank]]
    if "position_ids" in given:
        given["position_ids"] = given["position_ids"][:, begin : begin + lengths[rank]]
    output = model(piece, labels=piece, use_cache=False, **given)
    output.loss.backward()
    found = {"loss": output.loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}
    if size > 1:
        for x in found.values():
            dist.all_reduce(x, group=context.group)  # type: ignore[union-attr]
            x /= size
    logits = output.logits.detach()
    return {"logits": logits if context is None else together(logits, context, 1), **found}


def check_models(groups: dict[int, Any]) -> dict[str, Any]:
    """By case and degree, the largest relative distance of a result from that of the whole sequence on one rank; and,
    by case, that of the latter from its float64."""
    found, rounding = {}, {}
    for case, level in MODELS.items():
        model = made_model(case)
        vocabulary = model.config.vocab_size
        for packing in ("rows", "cu_seqlens", "position_ids"):
            if packing == "position_ids" and case != "kda":
                continue
            rows = 2 if packing == "rows" else 1
            ids = torch.randint(0, vocabulary, (rows, TOKENS), generator=torch.Generator().manual_seed(0))
            bounds = torch.tensor(DOCUMENTS)
            positions = torch.cat([torch.arange(n) for n in bounds.diff()])[None]
            given = {"rows": {}, "cu_seqlens": {"cu_seqlens": bounds}, "position_ids": {"position_ids": positions}}
            if level != "none":
                model.set_runtime(recompute="none")
            plain = run_model(model, ids, None, [TOKENS], **given[packing])
            if RANK == 0:
                exact = run_model(copy.deepcopy(model).double(), ids, None, [TOKENS], **given[packing])
                rounding[f"{case}, {packing}"] = furthest(plain, exact)
            if level != "none":
                model.set_runtime(recompute=level)
                model.train()
            for degree in (2, 3):
                if degree > RANK:
                    # One of these cuts leaves a piece shorter than what the convolution reaches back to.
                    lengths = [100, TOKENS - 100] if degree == 2 else [128, 2, TOKENS - 130]
                    context = ContextParallel(groups[degree], segment_length=64)
                    shared = run_model(model, ids, context, lengths, **given[packing])
                    found[f"{case}, {packing}, {degree}"] = furthest(shared, plain)
            model.eval()
    return {"distances": found, "rounding": rounding}


def furthest(results: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest distance of a tensor from what is expected, relative to the largest number in that."""
    return max(float((results[key] - x).abs().max() / x.abs().max().clamp(min=1e-6)) for key, x in expected.items())


def collectives_of(step: Any) -> int:
    """How many gathers a function starts."""
    with torch.profiler.profile() as profile:
        step()
    return sum(event.count for event in profile.key_averages() if event.key.startswith("gloo:"))


def check_recomputation(groups: dict[int, Any]) -> dict[str, Any]:
    """How many collectives a training step starts at each level of recomputation."""
    if RANK > 1:
        return {}
    found = {}
    for level in ("none", "elementwise", "block"):
        model = tiny_model("gated_deltanet").train()
        model.set_runtime(recompute=level)
        deltazoo.context_parallel(model, ContextParallel(groups[2], lengths=(64, 64)))
        ids = torch.zeros(1, 64, dtype=torch.long)
        found[level] = collectives_of(lambda model=model, ids=ids: model(ids, labels=ids).loss.backward())
    return found


def message(function: Any) -> str:
    """What a call raises."""
    try:
        function()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


PREFILLED = ("kda", "pgdn", "hybrid", "swapped")
"""A rule with a state of its own, and softmax layers."""


def check_prefill(groups: dict[int, Any]) -> dict[str, Any]:
    """By model and degree: whether one rank goes on from a shared prompt as from its own; and an error."""
    found = {}
    for name in PREFILLED:
        model = made_model(name)
        prompt = torch.randint(model.config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(0))
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        alone = model.generate(prompt, **options)
        for degree in range(2, SIZE + 1):
            if degree <= RANK:
                continue
            context = ContextParallel(groups[degree])
            deltazoo.context_parallel(model, context)
            begins = [0, 70, 72, 73][:degree] + [199]  # all tokens but the last
            piece = prompt[:, begins[RANK] : begins[RANK + 1]]
            cache = DynamicCache(config=model.config)
            run = partial(model, piece, past_key_values=cache)
            with torch.no_grad():
                run()
            again = message(run)
            deltazoo.context_parallel(model, None)
            together = model.generate(prompt, past_key_values=cache, **options)
            found[f"{name}, {degree}"] = [together.tolist() == alone.tolist(), again]
    return found


def check_errors(groups: dict[int, Any]) -> dict[str, Any]:
    """By case, what each rank raises."""
    if RANK > 1:
        return {}
    context = ContextParallel(groups[2])
    x = torch.randn(1, 64, 2, 8)

    def call(
        tokens: int = 64, width: int = 8, dtype: torch.dtype = torch.float32, beta: bool = True, **given: Any
    ) -> None:
        part = x[:, :tokens, :, :width].to(dtype)
        steps: Any = torch.rand(1, tokens, 2) if beta else None
        delta_rule(part, part, part, steps, context=context, **given)

    layer = DeltaRuleAttention("gated_deltanet", 16, 2)
    deltazoo.context_parallel(layer, context)
    cases: dict[str, Any] = {
        "boundaries": lambda: call(cu_seqlens=torch.tensor([0, 100])),
        "other boundaries": lambda: call(cu_seqlens=torch.tensor([0, 60 + RANK, 128])),
        "empty piece": lambda: call(tokens=64 * RANK),
        "shapes": lambda: call(width=8 - 4 * RANK),
        "dtypes": lambda: call(dtype=torch.float32 if RANK else torch.bfloat16),
        "rules": lambda: call(num_micro_steps=1, scale=1.0 + RANK),
        "one rank's error": lambda: call(precision="high" if RANK else None),
        "no step size on one rank": lambda: call(beta=RANK == 0),
        "another read on one rank": lambda: call(erase_reads="decayed" if RANK == 0 else "later"),
        "packed rows": lambda: layer(torch.randn(2, 64, 16), cu_seqlens=torch.tensor([0, 128])),
        "mask on one rank": lambda: layer(torch.randn(2, 64, 16), torch.ones(2, 64) if RANK else None),
    }
    found = {}
    for name, function in cases.items():
        messages: list[Any] = [None, None]
        dist.all_gather_object(messages, message(function), group=groups[2])
        found[name] = messages
    return found


CHECKS = {
    "operators": check_operators,
    "models": check_models,
    "recomputation": check_recomputation,
    "prefill": check_prefill,
    "errors": check_errors,
}


def main(folder: Path, checks: list[str]) -> None:
    torch.set_num_threads(1)
    if GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(f"cpu:{ONE_THREAD_GLOO},cuda:nccl" if GPU else ONE_THREAD_GLOO)
    groups = {degree: dist.new_group(list(range(degree))) for degree in range(1, SIZE + 1)}
    results = {}
    for name in checks:
        results[name] = CHECKS[name](groups)
        dist.barrier()
    if RANK == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
