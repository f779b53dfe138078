"""The measurements of `deltazoo bench model`, in order; every row is written as soon as it is measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.model_candidates import SIZES, Candidate, candidates
from benchmarks.model_decoding import context_rows, decoding_rows, decoding_ways
from benchmarks.model_results import ModelResults, ModelRow
from benchmarks.model_training import AUTOCAST, OUR_WAYS, kept_rows, profile_rows, training_rows
from benchmarks.provenance import describe_run

__all__ = ["GROUPS", "ModelPlan", "bench_models"]

GROUPS = ("train", "memory", "decode", "context", "profile")


@dataclass(frozen=True)
class ModelPlan:
    """One run of the benchmark; see the options of `deltazoo bench model`."""

    size: str
    mixers: list[str]
    peers: list[str]
    groups: list[str]
    device: str
    dtypes: list[str]
    """Names of torch's dtypes, or `autocast`, for training alone."""
    shapes: list[tuple[int, int]]
    """Training batches: rows and tokens per row."""
    batches: list[int]
    """Rows while decoding."""
    contexts: list[int]
    """Tokens before the timed ones."""
    training_ways: list[str]
    decoding_ways: list[str]
    training_steps: int
    new_tokens: int


def bench_models(
    plan: ModelPlan, out: Path, *, commit: str | None, command: list[str], report: Callable[[str], None]
) -> ModelResults:
    """Run the plan and write `out`; rows of an existing file are kept or replaced.

    Raises:
        ValueError: an unknown mixer or peer, or an existing file that is no result of this benchmark.
    """
    if AUTOCAST in plan.dtypes and {"decode", "context"} & set(plan.groups):
        raise ValueError("autocast is for training: measure train, memory or profile with it")
    results = ModelResults.load([out]) if out.exists() else ModelResults()
    taking_part, missing = candidates(SIZES[plan.size], plan.mixers, plan.peers, plan.device)
    run = describe_run(device=plan.device, commit=commit, command=command, missing_peers=missing)
    results.runs[run.id] = run
    for name, reason in missing.items():
        report(f"without {name}: {reason}")
    for candidate, dtype in product(taking_part, plan.dtypes):
        for row, measure, first in _measurements(plan, candidate, dtype):
            row = replace(row, run=run.id)
            try:
                for found in measure(row):
                    results.add(found)
                    report(_line(found))
            except Exception as error:  # peers and kernels under test may raise anything
                results.add(row.about(first).failed(error))
                report(_line(row.about(first).failed(error)))
            results.save(out)
            gc.collect()
            torch.compiler.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return results


def _measurements(
    plan: ModelPlan, candidate: Candidate, dtype: str
) -> Iterator[tuple[ModelRow, Callable[[ModelRow], Iterator[ModelRow]], str]]:
    """Every setting of one candidate: its row without a number, what measures it, and the first measure."""
    row = ModelRow(plan.size, candidate.model, candidate.library, "eager", dtype, 0, 0, measure="train_tok_s")
    weights = torch.float32 if dtype == AUTOCAST else getattr(torch, dtype)
    options: dict[str, Any] = {"device": plan.device, "dtype": weights}

    def build_for(row: ModelRow) -> Callable[[], Any]:
        return partial(candidate.build, **OUR_WAYS.get(row.way, {}))

    def train(row: ModelRow) -> Iterator[ModelRow]:
        return training_rows(build_for(row), row, steps=plan.training_steps, **options)

    def memory(row: ModelRow) -> Iterator[ModelRow]:
        return kept_rows(build_for(row), row, **options)

    def decode(row: ModelRow) -> Iterator[ModelRow]:
        build = partial(candidate.build, **OUR_WAYS.get(row.way.removeprefix("loop-"), {}))
        return decoding_rows(build, row, new_tokens=plan.new_tokens, **options)

    def context(row: ModelRow) -> Iterator[ModelRow]:
        return context_rows(candidate.build, row, new_tokens=plan.new_tokens, **options)

    def parts(row: ModelRow) -> Iterator[ModelRow]:
        return profile_rows(build_for(row), row, **options)

    ways = decoding_ways(candidate.library, plan.decoding_ways)
    training_ways = [way for way in plan.training_ways if way not in OUR_WAYS or candidate.library == "deltazoo"]
    if "train" in plan.groups:
        for batch, tokens in plan.shapes:
            for way in training_ways:
                yield replace(row, way=way, batch=batch, tokens=tokens), train, "train_tok_s"
    if "memory" in plan.groups:
        batch, tokens = plan.shapes[0]
        for way in training_ways:
            yield replace(row, way=way, batch=batch, tokens=tokens), memory, "kept_kib"
    if "decode" in plan.groups:
        for batch in plan.batches:
            for way in ways:
                yield replace(row, way=way, batch=batch, tokens=16), decode, "decode_tok_s"
    if "context" in plan.groups:
        loop = "loop" if candidate.library in ("deltazoo", "accelerated") else "generate"
        for tokens in plan.contexts:
            yield replace(row, way=loop, batch=1, tokens=tokens), context, "token_ms"
    if "profile" in plan.groups:
        batch, tokens = plan.shapes[0]
        for way in training_ways:
            yield replace(row, way=way, batch=batch, tokens=tokens), parts, "profile_ms"


def _line(row: ModelRow) -> str:
    value = row.error if row.value is None else f"{row.value:,.4g}"
    what = f"{row.measure} {row.part}".strip()
    return f"{row.name:<32} {row.way:<18} {row.batch:>3} x {row.tokens:<8} {what:<36} {value}"
