"""Tokens per second and memory of decoding after a long context."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from deltazoo.workbench.bench.timing import now
from deltazoo.workbench.evaluation_mode import evaluation_mode
from deltazoo.workbench.train.validation_loss import as_trained

__all__ = ["Decoding", "measure_decoding"]


@dataclass(frozen=True)
class Decoding:
    """Decoding speed after a context of a given length, one sequence.

    Attributes:
        context: tokens read before the first decoded one.
        tokens_per_second: of decoding: one over the median time of a token.
        prefill_seconds: time to read the context.
        cache_bytes: size of the cache afterwards.
        peak_bytes: peak GPU memory above that of the model; None on a CPU.
    """

    context: int
    tokens_per_second: float
    prefill_seconds: float
    cache_bytes: int
    peak_bytes: int | None


@torch.no_grad()
def measure_decoding(model: PreTrainedModel, context: int, *, decoded: int = 32, piece: int = 8192) -> Decoding:
    """Read ``context`` random tokens in pieces, then decode greedily.

    Args:
        model: any causal language model.
        context: tokens to read.
        decoded: tokens to decode and time, after two tokens that are not timed.
        piece: tokens read in one forward pass; bounds the memory of the pass.
    """
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, model.config.vocab_size, (1, context), generator=generator).to(model.device)
    cache = DynamicCache(config=model.config)
    with evaluation_mode(model):
        began = now(model.device)
        for part in ids.split(piece, dim=1):
            token = _next_token(model, part, cache)
        prefill = now(model.device) - began
        for _ in range(2):
            token = _next_token(model, token, cache)
        seconds = []
        for _ in range(decoded):
            began = now(model.device)
            token = _next_token(model, token, cache)
            seconds.append(now(model.device) - began)
    return Decoding(
        context=context,
        tokens_per_second=1 / median(seconds),
        prefill_seconds=prefill,
        cache_bytes=cache_bytes(cache),
        peak_bytes=torch.cuda.max_memory_allocated() - before if on_gpu else None,
    )


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds, each counted once."""
    tensors: dict[int, Tensor] = {}
    waiting: list[Any] = [cache]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            tensors[item.untyped_storage().data_ptr()] = item
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
        elif hasattr(item, "__dict__"):
            waiting.extend(vars(item).values())
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def _next_token(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> Tensor:
    logits = as_trained(model)(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1:].argmax(-1)
