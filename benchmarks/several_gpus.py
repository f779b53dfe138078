"""Speed, memory and efficiency on several GPUs, beside one GPU: operators, layers and whole models.

    torchrun --nproc-per-node 2 -m benchmarks.several_gpus --out benchmarks/results/several_gpus_2xh200.json

`--only` takes the beginnings of cases' names, and measures them in that order; `--seconds` begins no further case after
that time. Without GPUs everything has tiny sizes: a test of the script.

What is timed: a call on all ranks after a barrier; the slowest rank counts, and the median over repeats. "alone" is the
whole work on one GPU, which all ranks do at the same time without a word to each other.

* `operator`, `layer`: one row of tokens, forward, and forward and backward; bfloat16. Layers include projections. Our
  own are CUDA graphs, replayed four times in a row: as in training, ranks wait for each other and not for the host.
* `softmax`: causal attention of one row, keys and values of all ranks gathered, projections left out.
* `model`: bfloat16 weights with float32 gates, forward, backward, clipping, AdamW. DDP and FSDP2 have 8 rows (`--rows`)
  of 4,096 tokens per GPU; context parallelism and FSDP2 x CP one row of 131,072.
* `million`, `millions2`, `millions4`: forward and backward of one row of 1, 2 and 4 times 1,048,576 tokens with
  `recompute="block"`, the longer ones "nested". With little memory left PYTORCH_ALLOC_CONF=expandable_segments:True
  avoids gaps.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging

import deltazoo
from benchmarks.common import Results, Row, captured, now, options
from benchmarks.inputs import Shape, make_inputs
from benchmarks.models import PEERS, SIZES, candidates
from deltazoo.distributed import fully_shard_model, local_batch
from deltazoo.distributed.context import _attend_to_all_ranks
from deltazoo.layers import make_layer, parameter_groups
from deltazoo.layers.sequences import SharedSequences
from deltazoo.ops import ContextParallel, delta_rule

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if ON_GPU else torch.device("cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SMALL = 1 if ON_GPU else 512
"""Tokens are divided by this."""
OPERATORS = {"delta_net": ("delta", "none"), "gated_deltanet": ("gdn", "medium"), "kda": ("kda", "medium")}
"""Rule -> operator and strength of its gates."""
REPLAYS = 4
LONG_ROW = 131072 // SMALL
Rows = Iterator[Row]


class Ranks:
    """All processes, and times that all of them took."""

    def __init__(self) -> None:
        if ON_GPU:
            torch.cuda.set_device(DEVICE)
        backend = "nccl" if ON_GPU else "gloo"
        dist.init_process_group(backend, device_id=DEVICE if ON_GPU else None, timeout=timedelta(minutes=10))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.context: DeviceMesh = init_device_mesh(DEVICE.type, (1, self.size), mesh_dim_names=("dp", "cp"))["cp"]

    def wait(self) -> None:
        dist.barrier()
        if ON_GPU:
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object], repeats: int, warm_up: int = 2) -> list[float]:
        """Times of a call, of the slowest rank."""
        for _ in range(warm_up):
            call()
        taken = []
        for _ in range(repeats):
            self.wait()
            began = now(DEVICE)
            call()
            taken.append((now(DEVICE) - began) * 1e3)
        slowest = torch.tensor(taken, device=DEVICE)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.tolist()

    def most(self, value: float) -> float:
        """The largest of all ranks."""
        found = torch.tensor(value, device=DEVICE)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def peak_gib(self, call: Callable[[], object]) -> float | None:
        """Most memory held during a call on any rank."""
        if not ON_GPU:
            return None
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return self.most(torch.cuda.max_memory_allocated() / 2**30)

    def pieces(self, tokens: int) -> ContextParallel:
        """Even pieces of a row, whose lengths nobody has to ask for."""
        return ContextParallel(self.context, lengths=(tokens // self.size,) * self.size)


def spread(samples: list[float]) -> Row:
    return {"value": statistics.median(samples), "low": min(samples), "high": max(samples), "samples": len(samples)}


# Operators and layers: every maker returns a call of a piece of the row, or of the whole row without ranks.


def run(compute: Callable[[], Tensor], leaves: list[Tensor], gradient: Tensor, backward: bool) -> None:
    """One call, forward or forward and backward."""
    with nullcontext() if backward else torch.no_grad():
        output = compute()
    if backward:
        torch.autograd.grad(output, leaves, gradient)


def operator_call(rule: str, tokens: int, heads: int, backward: bool, ranks: Ranks | None) -> Callable:
    operator, gates = OPERATORS[rule]
    context = ranks and ranks.pieces(tokens)
    shape = Shape(1, tokens // (ranks.size if ranks else 1), heads, 128, 128)
    inputs = make_inputs(shape, operator, gates, device=str(DEVICE), dtype=DTYPE)

    def compute() -> Tensor:
        return delta_rule(inputs.q, inputs.k, inputs.v, inputs.beta, log_decay=inputs.log_decay, context=context)[0]

    return partial(run, compute, inputs.leaves(operator), inputs.d_output, backward)


def fla_call(rule: str, tokens: int, heads: int, backward: bool, ranks: Ranks | None) -> Callable:
    """flash-linear-attention's operator, on one GPU or under its own context parallelism."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    shape = Shape(1, tokens // (ranks.size if ranks else 1), heads, 128, 128)
    inputs = make_inputs(shape, *OPERATORS[rule], device=str(DEVICE), dtype=DTYPE)
    arguments: Row = {}
    if ranks is not None:
        from fla.ops.cp import build_cp_context

        boundaries = torch.tensor([0, tokens], dtype=torch.int32)
        group = ranks.context.get_group()
        context = build_cp_context(boundaries.to(DEVICE), group=group, cu_seqlens_cpu=boundaries)
        arguments = {"cp_context": context, "cu_seqlens": context.cu_seqlens}
    operator = {"gated_deltanet": chunk_gated_delta_rule, "kda": chunk_kda}[rule]

    def compute() -> Tensor:
        return operator(inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta, **arguments)[0]

    return partial(run, compute, inputs.leaves(OPERATORS[rule][0]), inputs.d_output, backward)


def layer_call(rule: str, tokens: int, heads: int, backward: bool, ranks: Ranks | None) -> Callable:
    torch.manual_seed(0)
    with DEVICE:
        layer = make_layer(rule, heads * 128, heads, 128, expand_v=1).to(DTYPE)
    deltazoo.context_parallel(layer, ranks and ranks.pieces(tokens))
    length = tokens // (ranks.size if ranks else 1)
    x = torch.randn(1, length, heads * 128, device=DEVICE, dtype=DTYPE, requires_grad=backward)
    return partial(run, partial(layer, x), [x, *layer.parameters()], torch.randn_like(x), backward)


def softmax_call(rule: str, tokens: int, heads: int, backward: bool, ranks: Ranks | None) -> Callable:
    """Attention of a softmax layer, heads of 128 channels; without ranks torch's, as a model calls it."""
    shape = (1, heads, tokens // (ranks.size if ranks else 1), 128)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=DTYPE, requires_grad=backward) for _ in range(3))
    if ranks is None:
        compute = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        return partial(run, compute, [q, k, v], torch.randn_like(q), backward)
    module, batch = nn.Module(), SimpleNamespace(sequences=SharedSequences(ranks.pieces(tokens), None))

    def compute() -> Tensor:
        return _attend_to_all_ranks(module, q, k, v, None, delta_batch=batch)[0].transpose(1, 2)

    return partial(run, compute, [q, k, v], torch.randn_like(q), backward)


def replays(call: Callable[[], object]) -> Callable[[], None]:
    """A function that replays a CUDA graph of the call `REPLAYS` times."""
    graph = captured(call)

    def replay() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    return replay


def call_rows(
    ranks: Ranks, case: str, library: str, make: Callable[..., Callable], rule: str, tokens: int, heads: int,
    repeats: int,
) -> Rows:  # fmt: skip
    """Forward, and forward and backward, of the whole row alone and of pieces together."""
    row = {"case": case, "what": rule, "library": library, "tokens": tokens, "heads": heads}
    for backward in (False, True):
        measure = "forward_backward_ms" if backward else "forward_ms"
        for way, sharing in (("alone", None), ("context parallel", ranks)):
            call, times = make(rule, tokens, heads, backward, sharing), 1
            if ON_GPU and library == "deltazoo":
                call, times = replays(call), REPLAYS
            found = spread([ms / times for ms in ranks.milliseconds(call, repeats)])
            peak = ranks.peak_gib(call) if backward else None
            yield {**row, "way": way, "measure": measure, **found, "peak_gib": peak}
            del call
            clear()


# Whole models.


def build(size: str, what: str, **runtime: Any) -> nn.Module:
    ours, peers = ([], [what]) if what in PEERS else ([what], [])
    (candidate,) = candidates(SIZES[size], ours, peers)
    torch.manual_seed(0)
    with DEVICE:
        return candidate.build(**runtime).to(DTYPE).train()


class TrainingStep:
    """Forward, backward, clipping and AdamW."""

    def __init__(self, model: nn.Module, batch: Row, learns: bool = True) -> None:
        self.model, self.batch = model, batch
        self.parameters = list(model.parameters())
        groups = parameter_groups(model, 0.1)
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=ON_GPU) if learns else None

    def __call__(self) -> None:
        self.model(**self.batch, use_cache=False).loss.backward()
        if self.optimizer is None:
            self.model.zero_grad(set_to_none=True)
            return
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def tokens_of(rows: int, length: int, vocabulary: int) -> Row:
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def model_step(ranks: Ranks, size: str, what: str, way: str, rows: int) -> tuple[TrainingStep, Row]:
    """A training step of a model, and what it is a step of; `rows` of one GPU, except where GPUs share rows."""
    size = size if ON_GPU else "quickstart"
    rows, length = (1, LONG_ROW) if way.startswith("long") or "CP" in way else (rows, 4096 // SMALL)
    batch = tokens_of(rows, length, SIZES[size].vocab_size)
    model = build(size, what)
    if "CP" in way:
        batch = local_batch(batch, ranks.context)
        deltazoo.context_parallel(model, ranks.pieces(length))
    if "FSDP2" in way and what == "llama":
        from torch.distributed.fsdp import fully_shard

        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    elif "FSDP2" in way:
        fully_shard_model(model)
    elif way in ("DDP", "CP"):
        model = DistributedDataParallel(model)
    row = {"case": "model", "what": what, "size": size, "way": way, "rows": rows, "tokens": length}
    return TrainingStep(model, batch), {**row, "library": "transformers" if what == "llama" else "deltazoo"}


def model_rows(ranks: Ranks, size: str, what: str, way: str, rows: int, repeats: int = 4) -> Rows:
    step, row = model_step(ranks, size, what, way, rows)
    samples = ranks.milliseconds(step, repeats, warm_up=4)  # the third step may be captured
    # Of all GPUs; "alone" is what one GPU does.
    tokens = row["rows"] * row["tokens"] * (ranks.size if way in ("DDP", "FSDP2") else 1)
    speed = spread([tokens / ms * 1e3 for ms in samples])
    yield {**row, "measure": "tokens_per_s", **speed, "peak_gib": ranks.peak_gib(step)}


def million_rows(ranks: Ranks, what: str, way: str, millions: int = 1) -> Rows:
    """Forward and backward; memory is that above weights and what else lies there before."""
    size, tokens = ("340m" if ON_GPU else "quickstart"), millions * 2**20 // SMALL
    model = build(size, what, recompute="block" if millions == 1 else "nested")
    for length in (tokens // 16, tokens):  # the short row compiles
        if way == "CP":
            deltazoo.context_parallel(model, ranks.pieces(length))
        batch = tokens_of(1, length, SIZES[size].vocab_size)
        step = TrainingStep(model, local_batch(batch, ranks.context) if way == "CP" else batch, learns=False)
        if length == tokens:
            clear()
            held = torch.cuda.memory_allocated() if ON_GPU else 0
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
        samples = ranks.milliseconds(step, repeats=1, warm_up=1 if length < tokens else 0)
    peak = ranks.most((torch.cuda.max_memory_allocated() - held) / 2**30) if ON_GPU else None
    row = {"case": "million", "what": what, "size": size, "library": "deltazoo", "way": way, "tokens": tokens}
    yield {**row, "measure": "forward_backward_ms", **spread(samples), "peak_gib": peak}


def clear() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def cases(ranks: Ranks, rows: int) -> dict[str, Callable[[], Rows]]:
    """By name, the most important first; models have that many rows."""
    found: dict[str, Callable[[], Rows]] = {}
    row, wide = LONG_ROW, 32768 // SMALL
    heads, many = (16, 64) if ON_GPU else (2, 4)
    gdn = "gated_deltanet"
    layer = partial(call_rows, ranks, "layer", "deltazoo", layer_call, repeats=5)
    operator = partial(call_rows, ranks, "operator", repeats=10, tokens=wide, heads=many)

    def add_models(what: str, size: str, *ways: str) -> None:
        for way in ways:
            name = way.replace(", ", "-").replace(" x ", "-")
            found[f"model-{what}-{size}-{name}"] = partial(model_rows, ranks, size, what, way, rows)

    found[f"layer-{gdn}"] = partial(layer, gdn, row, heads)
    for way in ("CP", "alone"):
        found[f"million-{gdn}-{way}"] = partial(million_rows, ranks, gdn, way)
    for millions in (2, 4):
        found[f"millions{millions}-{gdn}-CP"] = partial(million_rows, ranks, gdn, "CP", millions)
    for what, size in ((gdn, "1.3b"), (gdn, "340m"), ("llama", "340m"), ("llama", "1.3b")):
        add_models(what, size, "alone", "FSDP2", "DDP")
    add_models(gdn, "340m", "long, alone", "CP", "FSDP2 x CP")
    add_models("swapped", "340m", "long, alone", "CP")
    found["softmax"] = partial(call_rows, ranks, "softmax", "deltazoo", softmax_call, "softmax", row, heads, repeats=5)
    for rule in OPERATORS:
        found[f"wide-{rule}"] = partial(layer, rule, wide, many)
        found[f"operator-{rule}"] = partial(operator, "deltazoo", operator_call, rule)
        if rule != "delta_net":
            found[f"fla-{rule}"] = partial(operator, "fla", fla_call, rule)
    for rule in ("kda", "delta_net"):
        found[f"layer-{rule}"] = partial(layer, rule, row, heads)
        for size in ("340m", "1.3b"):
            add_models(rule, size, "alone", "FSDP2", "DDP", "long, alone", "CP", "FSDP2 x CP")
    return found


def main() -> int:
    """Command line, on all ranks, of which the first writes; exit status 1 if a case failed."""
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", help="names of cases, or beginnings of names; default: all")
    parser.add_argument("--rows", type=int, default=8, help="rows per GPU of the model cases")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further case after this time")
    arguments = parser.parse_args()
    arguments.device = DEVICE.type
    logging.disable_progress_bar()
    began, ranks = time.monotonic(), Ranks()
    known = cases(ranks, arguments.rows)
    chosen = []
    for start in arguments.only or [""]:
        chosen += [start] if start in known else [name for name in known if name.startswith(start)]
    results = Results(arguments) if ranks.rank == 0 else None
    for name in chosen:
        late = torch.tensor(time.monotonic() - began, device=DEVICE)
        dist.broadcast(late, 0)
        if float(late) > arguments.seconds:
            if results:
                print(f"not measured, no time left: {name}", flush=True)
            continue
        setting = {"ranks": ranks.size, "name": name}
        try:
            for row in known[name]():
                if results:
                    found = {key: row.pop(key) for key in ("value", "low", "high", "samples", "peak_gib") if key in row}
                    results.add(setting | row, found)
        except Exception as error:  # the next case may work
            if results:
                results.fail(setting | {"measure": None}, error)  # what was measured before it stays
        clear()
    dist.destroy_process_group()
    return results.status() if results else 0


if __name__ == "__main__":
    sys.exit(main())
