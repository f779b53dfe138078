"""Scores of tokens whose largest is a draw from the softmax of their logits: one launch for all rows and tokens."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.triton.launch import Constants, launch

_BLOCK = 1024


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def gumbel_scores_kernel(
    logits,  # [B, N], rows contiguous
    largest,  # [B]
    temperature,  # [B] float32
    seed,  # [B] int64
    position,  # [B] int64
    scores,  # [B, N] float32, contiguous
    row_stride,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * row_stride + columns, mask=columns < N, other=0.0).to(tl.float32)
    row_seed = tl.load(seed + row)
    key = _mixed(row_seed.to(tl.uint32) ^ 0x9E3779B9)
    key = _mixed(key ^ (row_seed >> 32).to(tl.uint32))
    key = _mixed(key ^ tl.load(position + row).to(tl.uint32))
    bits = _mixed(_mixed(columns.to(tl.uint32) + key) ^ _mixed(key ^ 0x85EBCA6B))
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    rest = 1.0 - uniform
    # -log(1 - uniform): the digits lost in 1 - uniform are missing in both its logarithm and the divisor.
    exponential = tl.where(rest == 1.0, uniform, tl.log(rest) * uniform / (rest - 1.0))
    heat = tl.load(temperature + row)
    is_greedy = heat == 0.0
    warm = tl.div_rn(value - tl.load(largest + row).to(tl.float32), tl.where(is_greedy, 1.0, heat))
    score = tl.where(is_greedy, value, warm - tl.log(exponential))
    tl.store(scores + row * N + columns, score, mask=columns < N)


def gumbel_scores(logits: Tensor, largest: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Logits over temperatures plus Gumbel noise, `[B, N]` float32; the logits themselves in rows of temperature 0.

    The noise is that of `deltazoo.generation.sampling.uniform_numbers`, to the rounding of logarithms.

    Args:
        logits: `[B, N]` float32, bfloat16 or float16.
        largest: `[B, 1]`, largest logit of each row, in the same dtype.
        temperature: `[B, 1]` float32.
        seed: `[B, 1]` int64.
        position: `[B, 1]` int64, at least 0.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    constants = _constants(*logits.shape, logits.stride(0))
    with torch.cuda.device_of(logits):
        launch(gumbel_scores_kernel, constants, logits, largest, temperature, seed, position, scores)
    return scores


@lru_cache(maxsize=1024)
def _constants(B: int, N: int, row_stride: int) -> Constants:
    return Constants(B, triton.cdiv(N, _BLOCK), row_stride=row_stride, N=N, BLOCK=_BLOCK)
