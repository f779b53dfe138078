"""Cross-entropy of the outputs of a linear map, a few rows at a time, without the logits of all rows.

    loss = logsumexp(x) - x[label],      d loss / d x = softmax(x) - onehot(label)

The forward pass also computes the gradients, while it has the logits, in two passes over memory; the gradient is
written over the logits. The backward pass scales them.
"""

from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deltazoo.ops.autograd_modes import transforming
from deltazoo.ops.dtypes import at_least_float32, autocast_dtype, cast_for_product, wide_dtype
from deltazoo.ops.fused.choice import takes_kernel
from deltazoo.ops.fused.optional_triton import Constants, launch, tl, triton

IGNORED = -100
"""The label of a row that does not count."""

_MOST_COLUMNS = 4096
"""Logits that a program computes at a time."""

_LOGITS_AT_ONCE = 2**26

_ROWS_OF_TILES = 256
"""Divisor of the rows of a large piece: the largest tile of matrix products on a GPU."""

_ADDS_TO_FLOAT32 = not torch.version.hip
"""Whether torch adds products of half precision to float32 on a GPU; torch for ROCm has no such products with float32
results."""


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The sum of `-log softmax(x weight^T)[label]` over rows; for any device and floating dtype.

    The rows are computed in pieces. Their gradients of `weight` are summed in float32, so that many pieces are as
    accurate as one.
    Products are in the dtype of `x` and `weight`, under autocast in its dtype. Inside `torch.compile`, transforms of
    torch.func and forward mode, and for second derivatives, autograd computes the gradients: the backward pass
    computes the logits of a piece again.

    Args:
        x: `[N, D]`.
        weight: `[V, D]`.
        labels: `[N]` int64; rows labelled `IGNORED` do not count.

    Returns:
        A number in float32, float64 for float64.

    Raises:
        ValueError: the number of labels differs from that of rows.
    """
    require_label_per_row(x, labels)
    if torch.compiler.is_compiling() or transforming():
        return _by_autograd(x, weight, labels)
    recording = torch.is_grad_enabled()
    wanted = (recording and x.requires_grad, recording and weight.requires_grad)
    return _LinearCrossEntropy.apply(x, weight, labels, *wanted)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, x_wanted: bool, weight_wanted: bool) -> Tensor:
        ctx.dtypes = x.dtype, weight.dtype
        ctx.save_for_backward(x, weight, labels)
        x, weight = cast_for_product(x, weight)
        with nullcontext() if autocast_dtype(x.device) is None else torch.autocast(x.device.type, enabled=False):
            loss, ctx.d_x, ctx.d_weight = _loss_and_gradients(x, weight, labels, x_wanted, weight_wanted)
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the gradients will be differentiated
            x, weight, labels = ctx.saved_tensors
            wanted = [tensor for tensor, needed in zip((x, weight), ctx.needs_input_grad, strict=False) if needed]
            found = iter(torch.autograd.grad(_by_autograd(x, weight, labels), wanted, d_loss, create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), None, None, None
        gradients = (
            None if gradient is None else (gradient * d_loss).to(dtype)
            for gradient, dtype in zip((ctx.d_x, ctx.d_weight), ctx.dtypes, strict=True)
        )
        return *gradients, None, None, None


def _loss_and_gradients(
    x: Tensor, weight: Tensor, labels: Tensor, x_wanted: bool, weight_wanted: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss, and its gradients for x in x's dtype and for the weight in float32 at least, None unless wanted."""
    wide = wide_dtype(weight)
    loss = x.new_zeros((), dtype=wide)
    d_x = torch.empty_like(x) if x_wanted else None
    d_weight = torch.zeros_like(weight, dtype=wide) if weight_wanted else None
    rows = max(1, _LOGITS_AT_ONCE // weight.shape[0])
    rows = max(rows % _ROWS_OF_TILES, rows - rows % _ROWS_OF_TILES)
    for start in range(0, len(x), rows):
        piece = slice(start, start + rows)
        losses, gradient = _cross_entropy(F.linear(x[piece], weight), labels[piece], wide)
        loss += losses.sum()
        if d_x is not None:
            d_x[piece] = gradient @ weight
        if d_weight is not None:
            _add_product(d_weight, gradient.T, x[piece])
    return loss, d_x, d_weight


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to `total`. A product in half precision is rounded before, unless torch can add it to float32."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.is_cuda and _ADDS_TO_FLOAT32:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _cross_entropy(
    logits: Tensor, labels: Tensor, wide: torch.dtype, *, fused: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Losses `[N]` in `wide` and the gradient `[N, V]` of their sum, which overwrites the contiguous `logits` `[N, V]`.

    A label outside the vocabulary raises RuntimeError, on a GPU at the next synchronisation.
    """
    if takes_kernel(fused, logits, labels):
        torch._assert_async(((labels == IGNORED) | ((labels >= 0) & (labels < logits.shape[1]))).all())
        losses = logits.new_empty(len(logits), dtype=torch.float32)
        if len(logits):
            with torch.cuda.device_of(logits):
                launch(cross_entropy_kernel, _constants(*logits.shape), logits, labels, losses)
        return losses, logits
    log_p = F.log_softmax(logits, dim=-1, dtype=wide)
    losses = F.nll_loss(log_p, labels, ignore_index=IGNORED, reduction="none")
    p = log_p.exp_()
    counts = (labels != IGNORED)[:, None].to(wide)
    p.scatter_add_(1, labels.clamp_min(0)[:, None], -counts)
    return losses, torch.mul(p, counts, out=logits)


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
        origin = tl.where(larger == float("-inf"), 0.0, larger)  # avoids a difference of infinities
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
def _constants(rows: int, V: int) -> Constants:
    block = min(_MOST_COLUMNS, triton.next_power_of_2(V))
    return Constants(rows, V=V, IGNORED=IGNORED, BV=block, num_warps=8 if block > 1024 else 4)


def _by_autograd(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    # Autocast caches the cast of a leaf for all pieces, and would sum their gradients in half precision; so a view.
    wide_weight = at_least_float32(weight).view_as(weight)
    rows = max(1, _LOGITS_AT_ONCE // weight.shape[0])

    def sum_of(x: Tensor, wide_weight: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(x, wide_weight.to(weight.dtype))
        return F.cross_entropy(at_least_float32(logits), labels, ignore_index=IGNORED, reduction="sum")

    again = partial(checkpoint, sum_of, use_reentrant=False, preserve_rng_state=False)
    loss_of = sum_of if transforming() else again  # torch.func allows no checkpoints
    losses = [
        loss_of(some_x, wide_weight, some_labels)
        for some_x, some_labels in zip(x.split(rows), labels.split(rows), strict=True)
    ]
    return torch.stack(losses).sum()


def require_label_per_row(x: Tensor, labels: Tensor) -> None:
    """Raise ValueError unless `labels` `[N]` has an entry for every row of `x` `[N, D]`."""
    if labels.shape != x.shape[:1]:
        raise ValueError(f"there are {x.shape[0]} positions to predict from, but {labels.numel()} labels")
