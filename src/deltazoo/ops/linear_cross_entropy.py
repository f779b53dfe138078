"""Cross-entropy behind a linear map without the logits of all rows: a few rows at a time, forward and backward."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deltazoo.ops.transforms import transforming

__all__ = ["IGNORED", "linear_cross_entropy"]

IGNORED = -100
"""The label of a row that does not count."""

_LOGITS_AT_ONCE = 2**25


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The sum of `-log softmax(x weight^T)[label]` over rows; any device and floating dtype.

    The backward pass computes the logits of a piece again. What the pieces add to the gradient of `weight` is summed
    in float32, so that more of them are no less accurate.

    Args:
        x: `[N, D]`.
        weight: `[V, D]`.
        labels: `[N]` int64; rows labelled `IGNORED` add nothing.

    Returns:
        A number in float32, float64 for float64.

    Raises:
        ValueError: as many labels as rows are needed.
    """
    require_label_per_row(x, labels)
    # A view, because autocast keeps one cast of a leaf for all pieces, whose gradients would add up in half precision.
    wide_weight = weight.to(torch.promote_types(weight.dtype, torch.float32)).view_as(weight)
    rows = max(1, _LOGITS_AT_ONCE // weight.shape[0])

    def sum_of(x: Tensor, wide_weight: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(x, wide_weight.to(weight.dtype))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")

    again = partial(checkpoint, sum_of, use_reentrant=False, preserve_rng_state=False)
    loss_of = sum_of if transforming() else again  # torch.func allows no checkpoints
    losses = [
        loss_of(some_x, wide_weight, some_labels)
        for some_x, some_labels in zip(x.split(rows), labels.split(rows), strict=True)
    ]
    return torch.stack(losses).sum()


def require_label_per_row(x: Tensor, labels: Tensor) -> None:
    """ValueError unless `labels` `[N]` has an entry for every row of `x` `[N, D]`."""
    if labels.shape != x.shape[:1]:
        raise ValueError(f"there are {x.shape[0]} positions to predict from, but {labels.numel()} labels")
