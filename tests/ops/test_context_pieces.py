"""Pieces of sequences on several ranks, here threads of one process: results, gradients and tokens of the whole."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from delta_rule_cases import PER_MICRO_STEP, PER_TOKEN, DeltaRuleCase, DeltaRuleInputs
from helpers import assert_close_in_float64, results_and_gradients
from torch import Tensor

from deltazoo.ops import ContextParallel, delta_rule
from deltazoo.ops.context import exchange, fold

STATES = ("final_state", "d_initial_state")
"""Results of all sequences, zeros on ranks where a sequence does not end or begin; others are of a rank's tokens."""


def context_of(rank: int, lengths: tuple[int, ...]) -> ContextParallel:
    """The context of a rank, as a process group would make it."""
    context = ContextParallel(segment_length=64)
    for name, value in (("rank", rank), ("size", len(lengths)), ("lengths", lengths)):
        object.__setattr__(context, name, value)
    return context


def on_ranks(
    lengths: tuple[int, ...],
    module: ModuleType,
    run: Callable[[ContextParallel, slice], Any],
    patch: pytest.MonkeyPatch,
) -> list[Any]:
    """What `run` returns on each rank, from its context and its place in the whole sequence; the module gathers."""
    sent: list[Tensor] = [torch.empty(0)] * len(lengths)
    barrier = Barrier(len(lengths), timeout=60)

    def gather(x: Tensor, context: ContextParallel) -> Tensor:
        sent[context.rank] = x
        barrier.wait()
        everything = torch.cat(sent)
        barrier.wait()
        return everything

    patch.setattr(module, "started_gather", gather)
    patch.setattr(module, "finished", lambda x, context: x)
    places = [slice(sum(lengths[:rank]), sum(lengths[: rank + 1])) for rank in range(len(lengths))]
    contexts = [context_of(rank, lengths) for rank in range(len(lengths))]
    with ThreadPoolExecutor(len(lengths)) as threads:
        return list(threads.map(run, contexts, places))


def shared(inputs: DeltaRuleInputs, lengths: tuple[int, ...], patch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Results and gradients of the whole sequences, of which every rank has a piece."""

    def run(context: ContextParallel, place: slice) -> dict[str, Tensor]:
        n = inputs.num_micro_steps
        spans = dict.fromkeys(PER_TOKEN, place) | dict.fromkeys(PER_MICRO_STEP, slice(place.start * n, place.stop * n))
        piece = {name: x[:, span] for name, span in spans.items() if (x := getattr(inputs, name)) is not None}
        return results_and_gradients(delta_rule, replace(inputs, **piece), backend="chunkwise", context=context)

    found = on_ranks(lengths, fold, run, patch)
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


@pytest.mark.parametrize("lengths", [(4, 5), (2, 1, 6), (7, 1, 1)], ids=str)
def test_ranks_have_tokens_of_others(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens, the last four before a piece and of all, and for each token the next; pieces may be shorter."""
    x = torch.arange(54.0).view(2, 9, 3)
    following = torch.cat([x[:, 1:, 0], torch.full((2, 1), -1.0)], 1)

    def run(context: ContextParallel, place: slice) -> None:
        piece = x[:, place]
        assert torch.equal(exchange.all_tokens(piece, context), x)
        (before,) = exchange.tokens_before([piece], 4, context)
        assert torch.equal(before, F.pad(x, (0, 0, 4, 0))[:, place.start : place.start + 4])
        assert torch.equal(exchange.last_tokens([piece], 4, context), x[:, -4:])
        assert torch.equal(exchange.next_tokens(piece[..., 0], context, -1), following[:, place])

    on_ranks(lengths, exchange, run, monkeypatch)
