"""Speed, memory and efficiency on several GPUs, beside one GPU: operators, layers and whole models.

    torchrun --nproc-per-node 2 scripts/measure_several_gpus.py --out benchmarks/results/several_gpus.jsonl

Every measurement is a line of the file, written as soon as it is there, and names the run (machine, versions, commit)
that the first line of a run describes. `--only` takes the beginnings of cases' names, and measures them in that order;
`--seconds` begins no further case after that time. Without GPUs everything has tiny sizes: a test of the script.

What is timed: a call on all ranks after a barrier; the slowest rank counts, and the median over repeats. "alone" is the
whole work on one GPU, which all ranks do at the same time without a word to each other.

* `operator`, `layer`: one row of tokens, forward, and forward and backward; bfloat16. Layers include projections.
* `model`: bfloat16 weights with float32 gates, forward, backward, clipping, AdamW. DDP and FSDP2 have 8 rows (`--rows`)
  of 4,096 tokens per GPU; tensor parallelism as many in all; context parallelism and FSDP2 x CP one row of 131,072.
* `million`: forward and backward of one row of 1,048,576 tokens with `recompute="block"`.
* `trace`: of a layer, or of a training step of a model: the time of all kernels, of NCCL's, how much of the latter
  other kernels run in, and how much of the time no kernel runs, when the GPU waits for the host. Times of a traced call
  are longer than those of others, as the tracer works on the host, too; `wall_ms` is that of calls without it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import deltazoo
from benchmarks.inputs import make_inputs
from benchmarks.model_candidates import SIZES, candidates
from benchmarks.provenance import describe_run
from benchmarks.shapes import Shape
from benchmarks.timing import captured, now
from deltazoo.distributed import clip_grad_norm_, fully_shard_model, local_batch
from deltazoo.layers import make_layer, parameter_groups
from deltazoo.ops import ContextParallel, delta_rule

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if ON_GPU else torch.device("cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SMALL = 1 if ON_GPU else 512
"""Tokens are divided by this."""
OPERATORS = {"delta_net": ("delta", "none"), "gated_deltanet": ("gdn", "medium"), "kda": ("kda", "medium")}
"""Mixer -> operator and strength of its gates."""
LONG_ROW = 131072 // SMALL
Row = dict[str, Any]
Rows = Iterator[Row]
Span = tuple[float, float]


class Ranks:
    """All processes, and times that all of them took."""

    def __init__(self) -> None:
        if ON_GPU:
            torch.cuda.set_device(DEVICE)
        backend = "nccl" if ON_GPU else "gloo"
        dist.init_process_group(backend, device_id=DEVICE if ON_GPU else None, timeout=timedelta(seconds=100))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh(DEVICE.type, (1, self.size), mesh_dim_names=("dp", "cp"))

    @property
    def context(self) -> DeviceMesh:
        return self.mesh["cp"]

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


def spread(samples: list[float]) -> Row:
    return {"value": statistics.median(samples), "low": min(samples), "high": max(samples), "samples": len(samples)}


def peak_gib(call: Callable[[], object], ranks: Ranks) -> float | None:
    """Most memory held during a call on any rank, in GiB."""
    if not ON_GPU:
        return None
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return ranks.most(torch.cuda.max_memory_allocated() / 2**30)


# Operators and layers.


def pieces(ranks: Ranks, tokens: int) -> ContextParallel:
    """Even pieces, whose lengths nobody has to ask for."""
    return ContextParallel(ranks.context, lengths=(tokens // ranks.size,) * ranks.size)


def operator_call(mixer: str, tokens: int, heads: int, backward: bool, context: ContextParallel | None) -> Callable:
    operator, gates = OPERATORS[mixer]
    inputs = make_inputs(Shape(1, tokens, heads, 128, 128), operator, gates, device=str(DEVICE), dtype=DTYPE)

    def compute() -> Tensor:
        return delta_rule(inputs.q, inputs.k, inputs.v, inputs.beta, log_decay=inputs.log_decay, context=context)[0]

    return partial(run, compute, inputs.leaves(operator), inputs.d_output, backward)


def run(compute: Callable[[], Tensor], leaves: list[Tensor], gradient: Tensor, backward: bool) -> None:
    """One call, forward or forward and backward."""
    with nullcontext() if backward else torch.no_grad():
        output = compute()
    if backward:
        torch.autograd.grad(output, leaves, gradient)


def fla_call(mixer: str, tokens: int, heads: int, backward: bool, group: Any, total: int) -> Callable:
    """flash-linear-attention's operator, on one GPU or under its own context parallelism."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    inputs = make_inputs(Shape(1, tokens, heads, 128, 128), *OPERATORS[mixer], device=str(DEVICE), dtype=DTYPE)
    options: Row = {}
    if group is not None:
        from fla.ops.cp import build_cp_context

        boundaries = torch.tensor([0, total], dtype=torch.int32)
        context = build_cp_context(boundaries.to(DEVICE), group=group, cu_seqlens_cpu=boundaries)
        options = {"cp_context": context, "cu_seqlens": context.cu_seqlens}
    operator = {"gated_deltanet": chunk_gated_delta_rule, "kda": chunk_kda}[mixer]

    def compute() -> Tensor:
        return operator(inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta, **options)[0]

    return partial(run, compute, inputs.leaves(OPERATORS[mixer][0]), inputs.d_output, backward)


def ring_call(tokens: int, heads: int, backward: bool, mesh: DeviceMesh | None) -> Callable:
    """Causal softmax attention of torch; with a mesh under its context parallelism, which exchanges keys and values.

    torch shards the buffers that it is given, and balances the ranks' work where one of them divides evenly. The
    tensors here are pieces already, so it gets a buffer that nobody reads.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, heads, tokens, 128, device=DEVICE, dtype=DTYPE, requires_grad=backward) for _ in range(3))
    gradient = torch.randn_like(q)

    def sharing() -> AbstractContextManager[None]:
        if mesh is None:
            return nullcontext()
        unread = torch.empty(2 * mesh.size(), device=DEVICE)
        return context_parallel(mesh, buffers=[unread], buffer_seq_dims=[0], no_restore_buffers={unread})

    def attention() -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # replaced while ranks share

    def call() -> None:
        with sharing(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            run(attention, [q, k, v], gradient, backward)

    return call


def layer_call(mixer: str, tokens: int, heads: int, backward: bool, context: ContextParallel | None) -> Callable:
    torch.manual_seed(0)
    with DEVICE:
        layer = make_layer(mixer, heads * 128, heads, 128, expand_v=1).to(DTYPE)
    deltazoo.context_parallel(layer, context)
    x = torch.randn(1, tokens, heads * 128, device=DEVICE, dtype=DTYPE, requires_grad=backward)
    return partial(run, partial(layer, x), [x, *layer.parameters()], torch.randn_like(x), backward)


def both_directions(
    ranks: Ranks, row: Row, make: Callable[..., Callable], alone: Row, together: Row, repeats: int, graph: bool
) -> Rows:
    """Forward, and forward and backward, of the whole row alone and of pieces together; `make` takes `backward`."""
    for backward in (False, True):
        measure = "forward_backward_ms" if backward else "forward_ms"
        for way, options in (("alone", alone), ("context parallel", together)):
            call = make(backward=backward, **options)
            if graph:
                call = captured(call).replay
            found = spread(ranks.milliseconds(call, repeats))
            peak = peak_gib(call, ranks) if backward else None
            yield {**row, "way": way, "graph": graph, "measure": measure, **found, "peak_gib": peak}
            del call
            clear()


def operator_rows(ranks: Ranks, mixer: str, tokens: int, heads: int) -> Rows:
    row = {"case": "operator", "what": mixer, "library": "deltazoo", "tokens": tokens, "heads": heads}
    make = partial(operator_call, mixer, heads=heads)
    alone, together = {"tokens": tokens, "context": None}, {"tokens": tokens // ranks.size}
    together |= {"context": pieces(ranks, tokens)}
    yield from both_directions(ranks, row, make, alone, together, repeats=10, graph=False)


def fla_rows(ranks: Ranks, mixer: str, tokens: int, heads: int) -> Rows:
    row = {"case": "operator", "what": mixer, "library": "fla", "tokens": tokens, "heads": heads}
    make = partial(fla_call, mixer, heads=heads, total=tokens)
    alone = {"tokens": tokens, "group": None}
    together = {"tokens": tokens // ranks.size, "group": ranks.context.get_group()}
    yield from both_directions(ranks, row, make, alone, together, repeats=10, graph=False)


def softmax_rows(ranks: Ranks, tokens: int, heads: int) -> Rows:
    row = {"case": "operator", "what": "softmax attention", "library": "torch", "tokens": tokens, "heads": heads}
    make = partial(ring_call, heads=heads)
    alone, together = {"tokens": tokens, "mesh": None}, {"tokens": tokens // ranks.size, "mesh": ranks.context}
    yield from both_directions(ranks, row, make, alone, together, repeats=3, graph=False)


def layer_rows(ranks: Ranks, mixer: str, tokens: int, heads: int, graph: bool) -> Rows:
    row = {"case": "layer", "what": mixer, "library": "deltazoo", "tokens": tokens, "heads": heads}
    make = partial(layer_call, mixer, heads=heads)
    alone, together = {"tokens": tokens, "context": None}, {"tokens": tokens // ranks.size}
    together |= {"context": pieces(ranks, tokens)}
    yield from both_directions(ranks, row, make, alone, together, repeats=5, graph=graph)


def trace_rows(ranks: Ranks, mixer: str, tokens: int, heads: int) -> Rows:
    """Forward and backward of a layer."""
    call = layer_call(mixer, tokens // ranks.size, heads, True, pieces(ranks, tokens))
    row = {"case": "trace", "what": mixer, "library": "deltazoo", "tokens": tokens, "heads": heads}
    yield from traced(ranks, call, {**row, "way": "context parallel"})


def trace_model_rows(ranks: Ranks, size: str, what: str, way: str, rows: int) -> Rows:
    """A training step."""
    step, row = model_step(ranks, size, what, way, rows)
    yield from traced(ranks, step, {**row, "case": "trace"})


def traced(ranks: Ranks, call: Callable[[], object], row: Row, calls: int = 5) -> Rows:
    """What kernels do in a call, each number from the rank where it is worst; the longest kernels are printed."""
    wall = spread(ranks.milliseconds(call, calls))
    # Without the host's side, which would slow the host down.
    with profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as recorded:
        ranks.wait()
        for _ in range(calls):
            call()
        if ON_GPU:
            torch.cuda.synchronize()
    kernels = kernels_after_first_exchange(recorded)
    exchange = union([span for name, span in kernels if "nccl" in name.lower()])
    other = union([span for name, span in kernels if "nccl" not in name.lower()])
    busy = union([span for _, span in kernels])
    whole = busy[-1][1] - busy[0][0] if busy else 0.0
    hidden = length_of(exchange) + length_of(other) - length_of(busy)
    found = {
        "traced_ms": ranks.most(whole / calls / 1e3),
        "kernels_ms": ranks.most(length_of([span for _, span in kernels]) / calls / 1e3),
        "exchange_ms": ranks.most(length_of(exchange) / calls / 1e3),
        "idle_share": ranks.most(1 - length_of(busy) / whole if busy else 0.0),
    }
    if row["way"] != "alone":
        found["hidden_share"] = -ranks.most(-(hidden / length_of(exchange) if exchange else 0.0))
    yield {**row, "measure": "wall_ms", **wall}
    for measure, value in found.items():
        yield {**row, "measure": measure, "value": value, "samples": calls}
    if ranks.rank == 0:
        print_longest(kernels, calls)


def kernels_after_first_exchange(recorded: profile) -> list[tuple[str, Span]]:
    """Kernels and copies by their begin, in microseconds, after the barrier, which is NCCL's first kernel."""
    events = [
        event
        for event in recorded.events() or ()
        # Marks of FSDP2 and of torch.distributed lie on the GPU's time line, too.
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(("nccl:", "FSDP::"))
    ]
    events.sort(key=lambda event: event.time_range.start)
    barrier = next((number for number, event in enumerate(events) if "nccl" in event.name.lower()), -1)
    return [(event.name, (event.time_range.start, event.time_range.end)) for event in events[barrier + 1 :]]


def print_longest(kernels: list[tuple[str, Span]], calls: int, count: int = 12) -> None:
    """The kernels that take longest in a call."""
    by_name: dict[str, list[float]] = {}
    for name, (start, end) in kernels:
        by_name.setdefault(name, []).append(end - start)
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:count]:
        print(f"    {sum(times) / calls / 1e3:8.3f} ms  {len(times) / calls:7.1f} x  {name[:100]}", flush=True)


def union(spans: list[Span]) -> list[Span]:
    """Spans that do not overlap and cover the same time."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def length_of(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)


# Whole models.


def build(size: str, what: str, **runtime: Any) -> nn.Module:
    mixers, peers = ([], ["llama"]) if what == "llama" else ([what], [])
    (candidate,), _ = candidates(SIZES[size], mixers, peers, DEVICE.type)
    torch.manual_seed(0)
    with DEVICE:
        return candidate.build(**runtime).to(DTYPE).train()


def divided(size: str, what: str) -> nn.Module:
    """The model under tensor parallelism, which transformers makes while it loads a checkpoint."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        build(size, what).save_pretrained(folder[0])
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(folder[0], dtype=DTYPE, tp_plan="auto").train()


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
        clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def tokens_of(rows: int, length: int, vocabulary: int) -> Row:
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def model_step(ranks: Ranks, size: str, what: str, way: str, rows: int) -> tuple[TrainingStep, Row]:
    """A training step of a model, and what it is a step of; `rows` of one GPU, except where GPUs share rows."""
    size = size if ON_GPU else "quickstart"
    long, context = way.startswith("long") or "CP" in way, "CP" in way
    rows, length = (1, LONG_ROW) if long else (rows, 4096 // SMALL)
    batch = tokens_of(rows, length, SIZES[size].vocab_size)
    model = divided(size, what) if way == "TP" else build(size, what)
    if context:
        batch = local_batch(batch, ranks.context)
        deltazoo.context_parallel(model, pieces(ranks, length))
    if "FSDP2" in way:
        if what == "llama":
            shard_llama(model)
        else:
            fully_shard_model(model)
    elif way in ("DDP", "CP"):
        model = DistributedDataParallel(model)
    row = {"case": "model", "what": what, "size": size, "way": way, "rows": rows, "tokens": length}
    return TrainingStep(model, batch), {**row, "library": "transformers" if what == "llama" else "deltazoo"}


def model_rows(ranks: Ranks, size: str, what: str, way: str, rows: int, repeats: int = 4) -> Rows:
    step, row = model_step(ranks, size, what, way, rows)
    samples = ranks.milliseconds(step, repeats, warm_up=2)
    # Of all GPUs; "alone" is what one GPU does.
    per_second = row["rows"] * row["tokens"] * (ranks.size if way in ("DDP", "FSDP2") else 1)
    speed = {name: per_second / ms * 1e3 for name, ms in spread(samples).items() if name != "samples"}
    speed["low"], speed["high"] = speed["high"], speed["low"]
    yield {**row, "measure": "tokens_per_s", **speed, "samples": repeats, "peak_gib": peak_gib(step, ranks)}


def shard_llama(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)


def million_rows(ranks: Ranks, what: str, way: str) -> Rows:
    """Forward and backward; memory is that above weights and what else lies there before."""
    size, tokens = ("340m" if ON_GPU else "quickstart"), 2**20 // SMALL
    model = build(size, what, recompute="block")
    for length in (tokens // 16, tokens):  # the short row compiles
        if way == "CP":
            deltazoo.context_parallel(model, pieces(ranks, length))
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

    def add_models(what: str, size: str, *ways: str) -> None:
        for way in ways:
            name = way.replace(", ", "-").replace(" x ", "-")
            found[f"model-{what}-{size}-{name}"] = partial(model_rows, ranks, size, what, way, rows)

    found["layer-gated_deltanet"] = partial(layer_rows, ranks, "gated_deltanet", row, heads, False)
    found["trace-gated_deltanet"] = partial(trace_rows, ranks, "gated_deltanet", row, heads)
    for way in ("alone", "FSDP2", "TP"):
        found[f"trace-model-gated_deltanet-340m-{way}"] = partial(
            trace_model_rows, ranks, "340m", "gated_deltanet", way, rows
        )
    for way in ("CP", "alone"):
        found[f"million-gated_deltanet-{way}"] = partial(million_rows, ranks, "gated_deltanet", way)
    for what, size in (("gated_deltanet", "1.3b"), ("gated_deltanet", "340m"), ("llama", "340m"), ("llama", "1.3b")):
        add_models(what, size, "alone", "FSDP2", "DDP")
    add_models("gated_deltanet", "340m", "long, alone", "CP", "FSDP2 x CP", "TP")
    add_models("gated_deltanet", "1.3b", "TP")
    found["wide-gated_deltanet"] = partial(layer_rows, ranks, "gated_deltanet", wide, many, False)
    for mixer in ("gated_deltanet", "kda", "delta_net"):
        found[f"operator-{mixer}"] = partial(operator_rows, ranks, mixer, wide, many)
        if mixer != "delta_net":
            found[f"fla-{mixer}"] = partial(fla_rows, ranks, mixer, wide, many)
    if ON_GPU:  # torch's context parallelism has no kernels for CPUs
        found["softmax"] = partial(softmax_rows, ranks, row, heads)
    for mixer in ("kda", "delta_net"):
        found[f"layer-{mixer}"] = partial(layer_rows, ranks, mixer, row, heads, False)
        for size in ("340m", "1.3b"):
            add_models(mixer, size, "alone", "FSDP2", "DDP", "TP", "long, alone", "CP", "FSDP2 x CP")
    if ON_GPU:
        found["graph-gated_deltanet"] = partial(layer_rows, ranks, "gated_deltanet", row, heads, True)
        found["graph-wide-gated_deltanet"] = partial(layer_rows, ranks, "gated_deltanet", wide, many, True)
    return found


def main(arguments: argparse.Namespace) -> int:
    logging.disable_progress_bar()
    began = time.monotonic()
    ranks = Ranks()
    described = describe_run(device=DEVICE.type, commit=arguments.commit, command=sys.argv)
    known = cases(ranks, arguments.rows)
    chosen = list(known)
    if arguments.only:
        chosen = []
        for start in arguments.only:
            chosen += [start] if start in known else [name for name in known if name.startswith(start)]
    if ranks.rank == 0:
        write(arguments.out, {"run": asdict(described), "ranks": ranks.size})
    failures = 0
    for name in chosen:
        late = torch.tensor(time.monotonic() - began, device=DEVICE)
        dist.broadcast(late, 0)
        if float(late) > arguments.seconds:
            if ranks.rank == 0:
                print(f"not measured, no time left: {name}", flush=True)
            continue
        try:
            for row in known[name]():
                if ranks.rank == 0:
                    write(arguments.out, {"run": described.id, "ranks": ranks.size, "name": name, **row})
                    print(f"{float(late):5.0f} s  {name:36} {short(row)}", flush=True)
        except Exception as error:  # the next case may work
            failures += 1
            traceback.print_exc(limit=-4)
            if ranks.rank == 0:
                message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                write(arguments.out, {"run": described.id, "ranks": ranks.size, "case": name, "error": message})
        clear()
    dist.destroy_process_group()
    return int(failures > 0)


def write(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def short(row: Row) -> str:
    peak = f", {row['peak_gib']:.1f} GiB" if row.get("peak_gib") else ""
    return f"{row['way']:18} {row['measure']:20} {row['value']:,.2f} ({row.get('low', 0):,.2f})" + peak


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines; rows are added")
    parser.add_argument("--only", nargs="+", help="beginnings of the names of cases; default: all")
    parser.add_argument("--rows", type=int, default=8, help="rows per GPU of the model cases; default: 8")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further case after this time")
    parser.add_argument("--commit", help="of the code, where git is missing")
    sys.exit(main(parser.parse_args()))
