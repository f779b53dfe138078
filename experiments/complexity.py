"""Time and memory of every way to compute the delta rule, by length, chunk size and head dimension."""

import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import peak_bytes
from deltazoo.layers import l2_normalize
from deltazoo.ops import delta_rule, resolve_backend

__all__ = ["FORMS", "flops", "measure_complexity", "parallel_scan"]

FORMS = {
    "token loop": "one step after another",
    "parallel scan": "log2(T) rounds of K x K matrix products on all tokens",
    "chunkwise": "matrix products inside chunks of 64, in plain torch",
    "triton": "the same in GPU kernels",
    "softmax": "torch's scaled_dot_product_attention, causal",
}
_HEADS = 4
_TOO_SLOW = 4.0  # seconds per call; longer sequences of that form are left out
_TOO_MUCH = 8 * 2**30  # bytes the scan's matrices may take


def measure_complexity(device: str, *, longest: int, seconds: float = 0.3) -> dict[str, Any]:
    """Time (and on a GPU peak memory) of forward passes; `seconds` per point.

    Args:
        device: where.
        longest: up to how many tokens.
        seconds: how long to repeat each measurement.
    """
    lengths = [2**i for i in range(8, int(math.log2(longest)) + 1)]
    forms = [form for form in FORMS if form != "triton" or _has_triton(device)]
    return {
        "heads": _HEADS,
        "length": [row for form in forms for row in _sweep(form, lengths, 64, device, seconds)],
        "scan": [row for form in ("parallel scan", "chunkwise") for row in _sweep(form, lengths, 16, device, seconds)],
        "chunk": [_chunk_row(size, min(longest, 4096), device, seconds) for size in (16, 32, 64, 128, 256)],
        "head_dim": [
            _row(form, min(longest, 2048), dim, device, seconds)
            for form in forms
            if form not in ("parallel scan", "token loop")
            for dim in (16, 32, 64, 128, 256)
        ],
    }


def flops(form: str, tokens: int, dim: int, chunk: int = 64) -> float:
    """Floating-point operations of a forward pass of one head with K = V = dim, a multiply-add counted as two."""
    if form == "token loop":
        return tokens * 8.0 * dim * dim
    if form == "parallel scan":
        return tokens * math.log2(tokens) * 4.0 * dim**3
    if form == "softmax":
        return 2.0 * tokens * tokens * dim
    return tokens * (8.0 * chunk * dim + 6.0 * dim * dim + chunk * chunk / 2)


def parallel_scan(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The delta rule by a parallel prefix scan over transition matrices, which costs more than the chunk form.

    Every token is an affine map `S -> A S + B`; maps compose, later ones on the left, and log2(T) rounds give all
    prefixes. Each composition multiplies K x K matrices: T log2(T) K^3 operations and T K^2 numbers in memory.

    Args:
        q, k, v: `[B, T, H, K]`; beta: `[B, T, H]`.

    Returns:
        `[B, T, H, K]`, as `deltazoo.ops.delta_rule`.
    """
    K = k.shape[-1]
    A = torch.eye(K, dtype=k.dtype, device=k.device) - beta[..., None, None] * k[..., :, None] * k[..., None, :]
    S = beta[..., None, None] * k[..., :, None] * v[..., None, :]
    reach = 1
    while reach < k.shape[1]:
        later, earlier = A[:, reach:], A[:, :-reach]
        S = torch.cat([S[:, :reach], later @ S[:, :-reach] + S[:, reach:]], dim=1)
        A = torch.cat([A[:, :reach], later @ earlier], dim=1)
        reach *= 2
    return torch.einsum("bthk,bthkv->bthv", q * K**-0.5, S)


def _has_triton(device: str) -> bool:
    return resolve_backend(None, device=device, dtype=torch.bfloat16, head_k_dim=64, head_v_dim=64)[0] == "triton"


def _inputs(tokens: int, dim: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    shape = (1, tokens, _HEADS, dim)
    q, k = (l2_normalize(torch.randn(shape, generator=generator)).to(device, dtype) for _ in range(2))
    v = torch.randn(shape, generator=generator).to(device, dtype)
    return q, k, v, torch.rand(shape[:3], generator=generator).to(device)


def _call(form: str, tokens: int, dim: int, device: str) -> Callable[[], Any]:
    q, k, v, beta = _inputs(tokens, dim, device)
    if form == "parallel scan":
        return lambda: parallel_scan(q.float(), k.float(), v.float(), beta)
    if form == "softmax":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    backend = {"token loop": "reference"}.get(form, form)
    return lambda: delta_rule(q, k, v, beta, backend=backend)


def _sweep(form: str, lengths: list[int], dim: int, device: str, seconds: float) -> Iterator[dict[str, Any]]:
    for tokens in lengths:
        if form == "parallel scan" and 3 * 4 * _HEADS * tokens * dim * dim > _TOO_MUCH:
            return
        row = _row(form, tokens, dim, device, seconds)
        yield row
        if row["seconds"] > _TOO_SLOW:
            return


@torch.no_grad()
def _row(form: str, tokens: int, dim: int, device: str, seconds: float) -> dict[str, Any]:
    call = _call(form, tokens, dim, device)
    return {
        "form": form,
        "tokens": tokens,
        "dim": dim,
        "seconds": _median_time(call, device, seconds),
        "bytes": peak_bytes(call) if torch.device(device).type == "cuda" else None,
        "flops": _HEADS * flops(form, tokens, dim),
    }


@torch.no_grad()
def _chunk_row(size: int, tokens: int, device: str, seconds: float) -> dict[str, Any]:
    """Time of the chunk form in plain torch with another chunk size."""
    with _chunk_size(size):
        found = _median_time(_call("chunkwise", tokens, 64, device), device, seconds)
    return {
        "chunk": size,
        "tokens": tokens,
        "dim": 64,
        "seconds": found,
        "flops": _HEADS * flops("chunkwise", tokens, 64, size),
    }


@contextmanager
def _chunk_size(size: int) -> Iterator[None]:
    module: Any = importlib.import_module("deltazoo.ops.chunkwise")
    usual = module.CHUNK_SIZE
    module.CHUNK_SIZE = size
    try:
        yield
    finally:
        module.CHUNK_SIZE = usual


def _median_time(call: Callable[[], Any], device: str, seconds: float) -> float:
    """Median over repeats; on a CPU of processor time, which a busy machine does not stretch."""
    on_gpu = torch.device(device).type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    times: list[float] = []
    call()
    while len(times) < 3 or (sum(times) < seconds and len(times) < 50):
        if on_gpu:
            torch.cuda.synchronize()
        start = clock()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(clock() - start)
        if times[-1] > _TOO_SLOW:
            break
    return statistics.median(times)
