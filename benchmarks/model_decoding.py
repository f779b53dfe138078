"""Decoding speed of a whole model: new tokens per second by batch size, and one more token by context length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.model_results import ModelRow
from benchmarks.timing import Spread, clock_for
from deltazoo.generation import Decoder
from deltazoo.generation.cache_argument import CACHE

__all__ = ["DECODING_WAYS", "context_rows", "decoding_rows", "decoding_ways"]

DECODING_WAYS = ("generate", "generate-plain", "loop", "loop-fast", "loop-compiled")
"""generate: the model's method, which captures its step on a GPU if it is ours; -plain: with `capture_step=False`.
loop: `deltazoo.generate`; -fast: of a model with every fusion there is; -compiled: with `compile=True`."""

_WAYS_OF = {"deltazoo": DECODING_WAYS, "accelerated": ("generate", "loop", "loop-compiled")}

_WARM_UP = 4
"""Tokens before the clock starts."""

_PIECE = 8192
"""Tokens of a prompt per forward pass."""


def decoding_ways(library: str, wanted: list[str]) -> list[str]:
    """The wanted ways that a library's models have."""
    return [way for way in wanted if way in _WAYS_OF.get(library, ("generate",))]


@torch.no_grad()
def decoding_rows(
    build: Callable[[], Any], row: ModelRow, *, device: str, dtype: torch.dtype, new_tokens: int
) -> Iterator[ModelRow]:
    """`decode_tok_s` for `row`'s way and batch, after a prompt of `row.tokens`."""
    model, ids = _prepared(build, row, device, dtype)
    clock = clock_for(device)
    if row.way.startswith("loop"):
        steps = _decoder(model, row, new_tokens).stream(ids, max_new_tokens=_WARM_UP + new_tokens)
        gaps = _stream_gaps(steps, clock)[_WARM_UP:]
        yield row.about("decode_tok_s").measured(_speed(gaps, row.batch))
        return
    options = {"do_sample": False, "capture_step": False} if row.way == "generate-plain" else {"do_sample": False}
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=_WARM_UP, **options)
    began = clock()
    model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options)
    _wait(device)
    yield row.about("decode_tok_s").measured(row.batch * new_tokens / (clock() - began))


@torch.no_grad()
def context_rows(
    build: Callable[[], Any], row: ModelRow, *, device: str, dtype: torch.dtype, new_tokens: int
) -> Iterator[ModelRow]:
    """`prefill_tok_s`, `token_ms` and on a GPU `context_peak_gib` after a context of `row.tokens`."""
    model, ids = _prepared(build, row, device, dtype)
    clock = clock_for(device)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if row.way.startswith("loop"):
        steps = _decoder(model, row, new_tokens).stream(ids, max_new_tokens=_WARM_UP + new_tokens)
    else:
        steps = _plain_steps(model, ids, _WARM_UP + new_tokens)
    began = clock()
    next(steps)
    yield row.about("prefill_tok_s").measured(row.batch * row.tokens / (clock() - began))
    gaps = _stream_gaps(steps, clock)[_WARM_UP - 1 :]
    yield row.about("token_ms").measured(Spread.of([1e3 * gap for gap in gaps]))
    if on_gpu:
        yield row.about("context_peak_gib").measured(torch.cuda.max_memory_allocated() / 2**30)


def _prepared(build: Callable[[], Any], row: ModelRow, device: str, dtype: torch.dtype) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    with torch.device(device):
        model = build().to(dtype).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model, torch.randint(0, model.config.vocab_size, (row.batch, row.tokens), device=device)


def _decoder(model: Any, row: ModelRow, new_tokens: int) -> Decoder:
    length = row.tokens + _WARM_UP + new_tokens
    return Decoder(model, row.batch, max_length=length, prefill_chunk=_PIECE, compile=row.way == "loop-compiled")


def _plain_steps(model: Any, ids: Tensor, new_tokens: int) -> Iterator[Tensor]:
    """Greedy tokens of any causal model, with the prompt in pieces and the model's own cache."""
    cache = None
    for piece in ids.split(_PIECE, dim=1):
        output = model(piece, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        cache = getattr(output, CACHE)
    for _ in range(new_tokens):
        token = output.logits[:, -1:].argmax(-1)
        yield token[:, 0].cpu()
        output = model(token, use_cache=True, **{CACHE: cache})


def _stream_gaps(steps: Iterator[Tensor], clock: Callable[[], float]) -> list[float]:
    """Seconds between one token and the next."""
    gaps, before = [], clock()
    for _ in steps:
        now = clock()
        gaps.append(now - before)
        before = now
    return gaps


def _speed(gaps: list[float], batch: int) -> Spread:
    """Tokens per second over all gaps, as transformers' method is timed, with the percentiles of single ones."""
    spread = Spread.of(gaps)
    return Spread(batch * len(gaps) / sum(gaps), batch / spread.high, batch / spread.low, spread.count)


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
