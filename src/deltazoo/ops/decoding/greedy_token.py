"""The likeliest token of every row, and the rows that have ended: one launch at the end of a decoding step."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.triton.launch import Constants, launch

_BLOCK = 8192
"""Logits that a program compares at once; with 16 warps, 16 of a thread."""


@triton.jit(do_not_specialize=["pad"])
def greedy_token_kernel(
    logits,  # [B, N], rows contiguous
    ends,  # [E] int64
    finished,  # [B] uint8, 0 or 1, updated in place
    token,  # [B] int64
    row_stride,
    pad,
    N: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = lanes
    nan = tl.zeros([BLOCK], tl.int32)
    for start in tl.static_range(0, N, BLOCK):
        columns = start + lanes
        value = tl.load(logits + row * row_stride + columns, mask=columns < N, other=float("-inf")).to(tl.float32)
        nan |= (value != value).to(tl.int32)
        better = value > best
        best = tl.where(better, value, best)
        where = tl.where(better, columns, where)
    largest = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == largest, where, N), axis=0).to(tl.int64)  # the first of equal ones
    # With NaN or infinity no token can be chosen, which -1 tells the reader.
    chosen = tl.where((tl.max(nan, axis=0) == 0) & (tl.abs(largest) < float("inf")), chosen, -1)
    had_ended = tl.load(finished + row) != 0
    chosen = tl.where(had_ended, pad, chosen)
    has_ended = had_ended
    for i in tl.static_range(E):
        has_ended = has_ended | (chosen == tl.load(ends + i))
    tl.store(finished + row, has_ended.to(tl.uint8))
    tl.store(token + row, chosen)


def greedy_token(logits: Tensor, ends: Tensor, finished: Tensor, pad: int, token: Tensor) -> None:
    """Choose the likeliest tokens; rows that have ended get padding.

    Args:
        logits: `[B, N]` float32, bfloat16 or float16; of equal ones the first is chosen.
        ends: `[E]` int64, tokens that end a row.
        finished: `[B, 1]` bool, True for rows that have ended; rows that end now are added.
        pad: token of rows that had ended before.
        token: `[B, 1]` int64, written; -1 in rows whose logits hold NaN or +inf, or are all -inf.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    constants = _constants(*logits.shape, logits.stride(0), len(ends), pad)
    with torch.cuda.device_of(logits):
        launch(greedy_token_kernel, constants, logits, ends, finished.view(torch.uint8), token)


@lru_cache(maxsize=1024)
def _constants(B: int, N: int, row_stride: int, E: int, pad: int) -> Constants:
    return Constants(B, row_stride=row_stride, pad=pad, N=N, E=E, BLOCK=_BLOCK, num_warps=16)
