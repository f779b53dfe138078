"""The language-modelling loss without the logits of all positions, which outweigh everything else in a small model.

32,768 tokens of a vocabulary of 32,000 have 2 GiB of logits in half precision, and the loss wants them in float32 and
their gradients besides. Here they exist a few rows at a time: `deltazoo.ops.linear_cross_entropy` in plain torch,
Liger's kernel with the runtime option `liger`.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.loss.loss_utils import ForCausalLMLoss

from deltazoo.ops.liger import liger_linear_cross_entropy
from deltazoo.ops.linear_cross_entropy import IGNORED, linear_cross_entropy

__all__ = ["loss_without_logits"]


def loss_without_logits(
    model: Any,
    hidden_states: Tensor,
    labels: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """What transformers' `ForCausalLMLoss` gives for `model.lm_head(hidden_states)`.

    Args:
        model: with `runtime` options, an `lm_head` and a `loss_function`.
        hidden_states: `[B, T, hidden_size]`, or `[N, hidden_size]`.
        labels: `[B, T]` or `[N]`; token t predicts label t + 1.
        num_items_in_batch: divides the summed loss; the number of labels that count unless given.
        shift_labels: labels that token t predicts itself, in place of `labels`.

    Raises:
        ValueError: the model has a loss function of its own, or a head that is more than a matrix; the labels do not
            fit the positions.
    """
    _refuse_another_loss(model)
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    targets = shift_labels.reshape(-1).to(hidden_states.device)
    summed = liger_linear_cross_entropy if model.runtime.liger else linear_cross_entropy
    loss = summed(hidden_states.reshape(-1, hidden_states.shape[-1]), model.lm_head.weight, targets)
    if num_items_in_batch is None:
        return loss / (targets != IGNORED).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def _refuse_another_loss(model: Any) -> None:
    head = model.lm_head
    reason = None
    if model.loss_function is not ForCausalLMLoss:
        reason = f"the model's loss_function is {model.loss_function!r}"
    elif type(head) is not nn.Linear:
        reason = f"lm_head is of {type(head)}"
    elif head.bias is not None:
        reason = "lm_head has a bias"
    elif isinstance(head.weight, DTensor):
        reason = "the weight of lm_head is spread over several devices"
    elif head._forward_hooks or head._forward_pre_hooks or "forward" in head.__dict__:
        reason = "lm_head has hooks"
    if reason:
        raise ValueError(
            "fuse_linear_cross_entropy computes cross-entropy from the weight of a plain lm_head, but "
            f"{reason}: call model.set_runtime(fuse_linear_cross_entropy=False)"
        )
