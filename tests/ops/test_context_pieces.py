"""Pieces of sequences on several ranks, here threads of one process: results and gradients of the whole sequences."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from delta_rule_cases import PER_MICRO_STEP, PER_TOKEN, DeltaRuleCase, DeltaRuleInputs
from helpers import assert_close_in_float64, results_and_gradients
from torch import Tensor

from deltazoo.ops import ContextParallel, delta_rule
from deltazoo.ops.context import fold

STATES = ("final_state", "d_initial_state")
"""Results of all sequences, zeros on ranks where a sequence does not end or begin; others are of a rank's tokens."""


def context_of(rank: int, lengths: tuple[int, ...]) -> ContextParallel:
    """The context of a rank, as a process group would make it."""
    context = ContextParallel(segment_length=64)
    for name, value in (("rank", rank), ("size", len(lengths)), ("lengths", lengths)):
        object.__setattr__(context, name, value)
    return context


def shared(inputs: DeltaRuleInputs, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Results and gradients of the whole sequences, of which every rank has a piece."""
    sent: list[Tensor] = [torch.empty(0)] * len(lengths)
    barrier = Barrier(len(lengths), timeout=60)

    def gather(x: Tensor, context: ContextParallel) -> Tensor:
        sent[context.rank] = x
        barrier.wait()
        everything = torch.cat(sent)
        barrier.wait()
        return everything

    def run(rank: int) -> dict[str, Tensor]:
        begin, n = sum(lengths[:rank]), inputs.num_micro_steps
        end = begin + lengths[rank]
        spans = dict.fromkeys(PER_TOKEN, slice(begin, end)) | dict.fromkeys(PER_MICRO_STEP, slice(begin * n, end * n))
        piece = {name: x[:, span] for name, span in spans.items() if (x := getattr(inputs, name)) is not None}
        context = context_of(rank, lengths)
        return results_and_gradients(delta_rule, replace(inputs, **piece), backend="chunkwise", context=context)

    monkeypatch.setattr(fold, "started_gather", gather)
    monkeypatch.setattr(fold, "finished", lambda x, context: x)
    with ThreadPoolExecutor(len(lengths)) as threads:
        found = list(threads.map(run, range(len(lengths))))
    parts = {name: [x[name] for x in found] for name in found[0]}
    return {name: torch.stack(x).sum(0) if name in STATES else torch.cat(x, 1) for name, x in parts.items()}


@pytest.mark.parametrize("lengths", [(64, 136), (128, 8, 64), (70, 130)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        DeltaRuleCase("rows", B=2, decay="scalar", initial_state=True),
        DeltaRuleCase("fresh", B=2, decay="channel", erase="gated", num_micro_steps=2),
        # Documents over cuts, one after another in a segment; those that begin at cuts; empty ones everywhere.
        DeltaRuleCase("over_cuts", lengths=(0, 30, 0, 60, 5, 0, 40, 65, 0), decay="scalar", initial_state=True),
        DeltaRuleCase("at_cuts", lengths=(64, 0, 6, 58, 0, 72, 0), decay="channel", groups=2, initial_state=True),
        DeltaRuleCase("fresh_documents", lengths=(64, 0, 6, 130, 0), decay="channel", erase="gated"),
        DeltaRuleCase("one_document", lengths=(0, 200, 0), initial_state=True),
    ],
    ids=str,
)
def test_ranks_compute_what_one_computes(
    case: DeltaRuleCase, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = replace(case, T=200, H=1, K=6, V=5).make(dtype=torch.float64)
    exact = results_and_gradients(delta_rule, inputs, backend="chunkwise")
    assert_close_in_float64(shared(inputs, lengths, monkeypatch), exact, inputs)
