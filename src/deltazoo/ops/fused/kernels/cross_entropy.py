"""Cross-entropy of logits and its gradient, in two passes over memory. The gradient is written over the logits.

loss = logsumexp(x) - x[label],      d loss / d x = softmax(x) - onehot(label)
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["cross_entropy_"]

_MOST_COLUMNS = 4096
"""Logits that a program works on at a time."""


@triton.jit(do_not_specialize=["IGNORED"])
def cross_entropy_kernel(logits, labels, losses, V, IGNORED, BV: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    label = tl.load(labels + row)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    own = tl.zeros([], tl.float32)
    for start in range(0, V, BV):
        columns = start + tl.arange(0, BV)
        x = tl.load(logits + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        origin = tl.where(larger == float("-inf"), 0.0, larger)  # no difference of infinities
        total = total * tl.exp(largest - origin) + tl.sum(tl.exp(x - origin), axis=0)
        own += tl.sum(tl.where(columns == label, x, 0.0), axis=0)
        largest = larger
    counts = label != IGNORED
    tl.store(losses + row, tl.where(counts, largest + tl.log(total) - own, 0.0))
    # Each thread reads and writes the elements that it has read in the first loop, so no barrier is needed.
    factor = tl.where(counts, 1 / total, 0.0)
    for start in range(0, V, BV):
        columns = start + tl.arange(0, BV)
        x = tl.load(logits + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - largest) * factor - tl.where(columns == label, 1.0, 0.0)
        tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < V)


@lru_cache(maxsize=64)
def _constants(rows: int, V: int, ignored: int) -> Constants:
    block = min(_MOST_COLUMNS, triton.next_power_of_2(V))
    return Constants(rows, V=V, IGNORED=ignored, BV=block, num_warps=8 if block > 1024 else 4)


def cross_entropy_(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Losses `[N]` in float32 of logits `[N, V]`, which are overwritten by the gradient of their sum.

    Args:
        logits: contiguous, float32, bfloat16 or float16, on an NVIDIA GPU.
        labels: `[N]` int64, below V; a row labelled `ignored` has loss and gradient 0.
    """
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    if len(logits):
        with torch.cuda.device_of(logits):
            launch(cross_entropy_kernel, _constants(*logits.shape, ignored), logits, labels, losses)
    return losses
