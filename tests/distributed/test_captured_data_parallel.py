"""Captured training steps under DistributedDataParallel and FSDP2, on two CPU processes, with graphs stood in for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from captured_training import as_on_a_gpu
from several_processes import run_in_processes
from tiny_models import tiny_model, tokens
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from deltazoo.distributed import fully_shard_model

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.001},
    "FSDP2": {"shard": {}},
    "FSDP2, mixed": {"shard": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}},
}


def gradients(option: Any, options: dict[str, Any], accumulate: bool) -> tuple[list[list[Tensor]], int]:
    """Averaged gradients of six steps; rank 1 has a row of another length in the second, and so captures later."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = tiny_model("gated_deltanet", captured_training=option).train()
    if options.get("find_unused_parameters"):
        model.model.layers[0].register_parameter("unused", torch.nn.Parameter(torch.zeros(3)))
    shard = options.get("shard")
    wrapped = DistributedDataParallel(model, **options) if shard is None else fully_shard_model(model, **shard)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(6):
        batch = tokens(2, 9 if rank == 1 and step == 1 else 12, seed=10 * step + rank)
        if accumulate:
            with getattr(wrapped, "no_sync", nullcontext)():
                wrapped(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        wrapped(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        found.append([getattr(p.grad, "full_tensor", p.grad.clone)() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return found, sum(kept.replayed for kept in [vars(model.model).get("_captured_training")] if kept)


def on_a_rank(options: dict[str, Any], accumulate: bool) -> tuple[bool, int, float]:
    """Whether captured steps give the gradients of eager ones, how many were captured, and the sum of all gradients."""
    with pytest.MonkeyPatch.context() as patched:
        as_on_a_gpu(patched)
        eager, none = gradients(False, options, accumulate)
        captured, replays = gradients("auto", options, accumulate)
    assert none == 0
    alike = all(torch.equal(x, y) for a, b in zip(eager, captured, strict=True) for x, y in zip(a, b, strict=True))
    return alike, replays, sum(float(x.double().sum()) for step in captured for x in step)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_eager_steps(name):
    accumulate = name in ("plain", "views", "FSDP2")
    ranks = run_in_processes(2, on_a_rank, OPTIONS[name], accumulate)
    assert all(alike for alike, *_ in ranks)
    assert [replays for _, replays, _ in ranks] == [(2 if accumulate else 1) * (6 - rank) - 2 for rank in range(2)]
    assert ranks[0][2] == ranks[1][2]
