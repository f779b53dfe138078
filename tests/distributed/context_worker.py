"""Run by test_context_parallel.py under torchrun: sequences that 1, 2, 3 and 4 ranks share.

    torchrun --nproc-per-node 4 tests/distributed/context_worker.py FOLDER operators models errors

Of the cases of a check every fourth from the second on: rounding:1:4.
Rank 0 writes FOLDER/results.json: by check, what it found. With CUDA every rank has a GPU, and the operator's kernels
run on it.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).parents[1]))
from delta_rule_cases import PER_MICRO_STEP, PER_TOKEN, DeltaRuleCase, DeltaRuleInputs
from foreign_models import accelerated, shaken
from helpers import Missed, assert_within_reference, results_and_gradients
from one_thread_gloo import ONE_THREAD_GLOO
from tiny_families import swapped
from tiny_models import tiny_model

import deltazoo
from deltazoo.distributed.context import _attend_to_all_ranks
from deltazoo.layers import DeltaRuleAttention
from deltazoo.layers.sequences import SharedSequences
from deltazoo.ops import ContextParallel, DeltaRuleOutput, delta_rule, linear_attention
from deltazoo.runtime import RECOMPUTE_LEVELS

GPU = torch.cuda.is_available()
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", RANK) if GPU else torch.device("cpu")
HEAD, SEGMENT = (128, 256) if GPU else (8, 64)
ERASE = {"erase": "near", "erase_reads": "undecayed", "num_micro_steps": 2, "beta": 0.7}

OPERATORS: dict[str, dict[str, Any]] = {
    "no decay": {"beta": 0.9},
    "no decay, gains above 1 from the middle of segments on": {"rises": True},
    "decay per head, rows of unequal cells": {"decay": "scalar", "B": 2, "T": 300},
    "decay per channel": {"decay": "channel", "groups": 2},
    "packed": {"decay": "scalar", "lengths": (30, 0, 170, 190, 60, 62)},
    "packed, per channel, a document over all ranks": {"decay": "channel", "beta": 0.9, "lengths": (20, 480, 12)},
    "erase key, undecayed, micro-steps": {"decay": "scalar", **ERASE},
    "packed, micro-steps": {"decay": "channel", "lengths": (129, 383), **ERASE, "erase_reads": "decayed"},
    # No kernel reads the state before a decay per channel.
    "packed, undecayed, micro-steps": {"backend": "chunkwise", "decay": "channel", "lengths": (129, 383), **ERASE},
    "linear attention": {"decay": "scalar", "corrected": False},
    "definition": {"backend": "reference", "decay": "scalar", "T": 256, "dtype": torch.float32},
    # Without a context these heads have fused kernels on a GPU.
    "many heads": {"H": 80, "T": 256},
    "many heads, decay per head": {"H": 80, "T": 256, "decay": "scalar", "beta": 0.9},
    "many heads, decay per channel": {"H": 80, "T": 256, "decay": "channel", "beta": 0.9},
}
"""Calls of the operator, as `DeltaRuleCase`s and what they lack; tokens are counted for segments of 64."""
if GPU:
    OPERATORS |= {f"decay per channel, {x}": {"decay": "channel", "dtype": x} for x in (torch.float16, torch.float32)}


def cuts(tokens: int, degree: int) -> list[int]:
    """Uneven pieces, cut at multiples of the segment length."""
    parts = {1: [], 2: [2], 3: [1, 2], 4: [1, 1, 1]}[degree]
    return [*(part * SEGMENT for part in parts), tokens - sum(parts) * SEGMENT]


def operator_inputs(
    lengths: tuple[int, ...] | None = None, T: int = 512, rises: bool = False, corrected: bool = True,
    dtype: torch.dtype = torch.bfloat16 if GPU else torch.float32, backend: str | None = None, **options: Any,
) -> DeltaRuleInputs:  # fmt: skip
    """Arguments for the whole sequences, the same on all ranks."""
    unit, sizes = SEGMENT // 64, {"B": 1, "K": HEAD, "V": HEAD if GPU else 6, "initial_state": True}
    case = DeltaRuleCase(
        "operator", T=T * unit, lengths=lengths and tuple(unit * x for x in lengths), **{**sizes, **options}
    )
    inputs = case.make(device=DEVICE, dtype=dtype)
    if rises:  # step sizes of up to 1, then of up to 2
        inputs.beta[:, torch.arange(case.T) % (3 * SEGMENT) < 3 * SEGMENT // 2] /= 2
    return inputs if corrected else replace(inputs, beta=None)


def uncorrected(beta: None = None, **arguments: Any) -> DeltaRuleOutput:
    """Linear attention by the arguments of `delta_rule`."""
    return linear_attention(**arguments)


def run_operator(
    inputs: DeltaRuleInputs, backend: str | None, context: ContextParallel | None = None, lengths: Sequence[int] = ()
) -> dict[str, Tensor]:
    """Results and gradients of the whole sequences, put together from the pieces of all ranks."""
    function = uncorrected if inputs.beta is None else delta_rule
    if context is None:
        return results_and_gradients(function, inputs, backend=backend)
    begin = sum(lengths[: context.rank])
    end, n = begin + lengths[context.rank], inputs.num_micro_steps
    spans = dict.fromkeys(PER_TOKEN, slice(begin, end)) | dict.fromkeys(PER_MICRO_STEP, slice(begin * n, end * n))
    piece = {name: getattr(inputs, name)[:, x] for name, x in spans.items() if getattr(inputs, name) is not None}
    found = results_and_gradients(function, replace(inputs, **piece), backend=backend, context=context)
    for name, x in found.items():
        if name not in ("final_state", "d_initial_state"):
            found[name] = together(x, context, 1)
        elif context.size > 1:
            dist.all_reduce(x, group=context.group)
    return found


def together(x: Tensor, context: ContextParallel, axis: int) -> Tensor:
    """The pieces of all ranks side by side."""
    if context.size == 1:
        return x
    pieces: list[Any] = [None] * context.size
    dist.all_gather_object(pieces, x.cpu(), group=context.group)
    return torch.cat(pieces, axis).to(DEVICE)


def check_operators(groups: dict[int, Any]) -> dict[str, Any]:
    """By case and degree, the results that differ in any bit from those of one rank.

    Those of torch's own backends differ by rounding on GPUs, where the order of its sums depends on how many there are.
    """
    found = {}
    for name, options in OPERATORS.items():
        inputs, backend = operator_inputs(**options), options.get("backend")
        tokens = inputs.q.shape[1]
        alone = run_operator(inputs, backend, ContextParallel(segment_length=SEGMENT), [tokens])
        for degree in range(2, SIZE + 1):
            if degree > RANK:
                context = ContextParallel(groups[degree], segment_length=SEGMENT)
                shared = run_operator(inputs, backend, context, cuts(tokens, degree))
                if GPU and backend is not None:
                    wrong = beyond_rounding(shared, inputs)
                else:
                    wrong = [key for key in alone if not torch.equal(alone[key], shared[key])]
                found[f"{name}, {degree}"] = wrong
    return found


def beyond_rounding(results: dict[str, Tensor], inputs: DeltaRuleInputs) -> list[str]:
    """Results that are further from float64 than twice the error of plain torch in the same dtype and four roundings.

    The four are of state, inverse, corrections and scores. In float32 GPUs multiply with two bits less: sixteen there.
    """
    exact, plain = (run_operator(x, "chunkwise") for x in (inputs.double(), inputs))
    floor = 16.0 if GPU and inputs.q.dtype == torch.float32 else 4.0
    return missed(results, exact, plain, inputs, rounding=inputs.q.dtype, floor=floor)


def missed(*results: Any, **limits: Any) -> list[str]:
    """What `assert_within_reference` says of the results that err too much."""
    try:
        assert_within_reference(*results, **limits)
    except Missed as error:
        return str(error).splitlines()
    return []


def check_rounding(groups: dict[int, Any], first: int = 0, step: int = 1) -> dict[str, Any]:
    """By case, with a context of one rank and without one, results that are not right to rounding."""
    found = {}
    for name, options in list(OPERATORS.items())[first::step] if RANK == 0 else ():
        inputs, backend = operator_inputs(**options), options.get("backend")
        for what, context in (("with a context", ContextParallel(segment_length=SEGMENT)), ("without", None)):
            results = run_operator(inputs, backend, context, [inputs.q.shape[1]])
            found[f"{name}, {what}"] = beyond_rounding(results, inputs)
    return found


def made_model(case: str) -> Any:
    """A tiny model: ours, swapped, or one of transformers' own that is accelerated."""
    torch.manual_seed(0)
    if case == "swapped":
        return swapped("llama", [0], "kda")
    if case == "accelerated":
        model = accelerated("qwen3_next")
        model.set_experts_implementation("eager")  # the others take no float64
        return model.eval()
    return tiny_model(case).eval()


MODELS = {"kda": "none", "pgdn": "none", "hybrid": "nested", "swapped": "none", "accelerated": "none"}
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
    """By case and degree, results further from float64 than twice the error of one rank in float32 and four roundings.

    One rank computes nine times, with weights that differ in their last place. The gradients of the decay need that:
    their terms cancel, and between orders of summation the error of one tensor differs by a factor of ten. The four
    roundings are those of the loss: of the ranks' shares, of two additions and of a division.
    """
    found = {}
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
            if RANK == 0:
                models = [copy.deepcopy(model).double(), model, *(shaken(model) for _ in range(8))]
                exact, *plain = [run_model(x, ids, None, [TOKENS], **given[packing]) for x in models]
            if level != "none":
                model.set_runtime(recompute=level)
                model.train()
            for degree in (2, 3):
                if degree > RANK:
                    # One of these cuts leaves a piece shorter than what the convolution reaches back to.
                    lengths = [100, TOKENS - 100] if degree == 2 else [128, 2, TOKENS - 130]
                    context = ContextParallel(groups[degree], segment_length=64)
                    shared = run_model(model, ids, context, lengths, **given[packing])
                    if RANK == 0:
                        found[f"{case}, {packing}, {degree}"] = missed(shared, exact, plain, None, floor=4.0)
            model.eval()
    return found


def collectives_of(step: Any) -> int:
    """How many gathers a function starts."""
    with torch.profiler.profile() as profile:
        step()
    events = profile.profiler.kineto_results.events()  # key_averages() takes a second and more for its tables
    return sum(event.name().startswith("gloo:") for event in events)


def check_recomputation(groups: dict[int, Any]) -> dict[str, Any]:
    """How many collectives a training step starts at each level of recomputation."""
    if RANK > 1:
        return {}
    found = {}
    for level in RECOMPUTE_LEVELS:
        model = tiny_model("gated_deltanet").train()
        model.set_runtime(recompute=level)
        deltazoo.context_parallel(model, ContextParallel(groups[2], lengths=(64, 64)))
        ids = torch.zeros(1, 64, dtype=torch.long)
        found[level] = collectives_of(lambda model=model, ids=ids: model(ids, labels=ids).loss.backward())
    return found


def check_attention(groups: dict[int, Any]) -> dict[str, Any]:
    """By dtype, packing and degree, results of shared softmax attention, and gradients, that differ from those of whole
    rows on any rank.

    Three ranks share two heads of keys. In bfloat16 both round probabilities, in blocks that begin elsewhere.
    """
    found = {}
    for degree, lengths in ((2, [70, 130]), (3, [70, 2, 128])):
        if degree > SIZE or degree <= RANK:
            continue
        context = ContextParallel(groups[degree], lengths=tuple(lengths))
        begin = sum(lengths[:RANK])
        end = begin + lengths[RANK]
        for dtype, documents in product((torch.float32, torch.bfloat16), (None, [0, 20, 20, 100, 150, 200])):
            rows, bounds = (2, None) if documents is None else (1, torch.tensor(documents, device=DEVICE))
            ends = torch.tensor((documents or [0, 200])[1:])
            number = torch.bucketize(torch.arange(200), ends, right=True)
            mask = (number[:, None] == number).tril().to(DEVICE)
            generator = torch.Generator(DEVICE).manual_seed(0)
            shapes = (4, 200, 64), (2, 200, 64), (2, 200, 64), (4, 200, 64)
            whole = [torch.randn(rows, *shape, device=DEVICE, generator=generator).to(dtype) for shape in shapes]
            batch = SimpleNamespace(sequences=SharedSequences(context, bounds))
            results = []
            for tensors in (whole, [x[:, :, begin:end] for x in whole]):
                *inputs, d_output = (x.clone().requires_grad_() for x in tensors)
                if tensors is whole:
                    output = F.scaled_dot_product_attention(*inputs, mask, enable_gqa=True)
                else:
                    module = SimpleNamespace(is_causal=True)
                    output = _attend_to_all_ranks(module, *inputs, None, delta_batch=batch)[0].transpose(1, 2)
                gradients = torch.autograd.grad(output, inputs, d_output)
                results.append([x if tensors is not whole else x[:, :, begin:end] for x in (output, *gradients)])
            limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
            pairs = zip("oqkv", *results, strict=True)
            wrong = [name for name, x, y in pairs if (x - y).double().norm() > limit * x.double().norm()]
            everyone: list[Any] = [None] * degree
            dist.all_gather_object(everyone, wrong, group=groups[degree])
            found[f"{dtype}, {'rows' if documents is None else 'packed'}, {degree}"] = sum(everyone, [])
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
    model = tiny_model("gated_deltanet")
    deltazoo.context_parallel(model, context)
    documents = 1 + torch.arange(64)[None] // 40
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
        "documents in the mask": lambda: model(documents, attention_mask=documents),
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
    "rounding": check_rounding,
    "models": check_models,
    "recomputation": check_recomputation,
    "prefill": check_prefill,
    "attention": check_attention,
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
        check, *part = name.split(":")
        results[check] = CHECKS[check](groups, *map(int, part))
        dist.barrier()
    if RANK == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
