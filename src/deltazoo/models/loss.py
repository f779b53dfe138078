"""The language-modelling loss without the logits of all positions, which take more memory than a small model.

In half precision the logits of 32,768 tokens and a vocabulary of 32,000 take 2 GiB. The loss needs them and their
gradients in float32. Here a few rows of logits exist at a time (`deltazoo.ops.fused.linear_cross_entropy`).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.loss.loss_utils import ForCausalLMLoss

from deltazoo.ops.autograd_modes import transforming
from deltazoo.ops.fused import IGNORED, linear_cross_entropy
from deltazoo.ops.linear_maps import is_hooked

__all__ = ["describe_loss", "fuses_loss", "loss_without_logits", "reason_for"]


def fuses_loss(model: Any) -> bool:
    """Whether a training step of the model uses `loss_without_logits`.

    Unless the runtime option `fuse_linear_cross_entropy` says otherwise, it does so wherever loss and gradients are the
    same. Three cases compute all logits: compiled code, which cannot compute them later; function transforms; and a
    model in float64, whose loss transformers computes in float32.
    """
    if model.runtime.fuse_linear_cross_entropy is not None:
        return model.runtime.fuse_linear_cross_entropy
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not transforming()
        and _obstacle(model) is None
        and model.lm_head.weight.dtype != torch.float64
    )


def loss_without_logits(
    model: Any,
    hidden_states: Tensor,
    labels: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """The loss that transformers' `ForCausalLMLoss` computes from `model.lm_head(hidden_states)`.

    Args:
        model: a model with `runtime` options, an `lm_head` and a `loss_function`.
        hidden_states: `[B, T, hidden_size]`, or `[N, hidden_size]`.
        labels: `[B, T]` or `[N]`; token t predicts label t + 1.
        num_items_in_batch: divisor of the summed loss; default: the number of labels that are not ignored.
        shift_labels: labels in place of `labels` of which number t is predicted by token t.

    Raises:
        ValueError: the model has another loss function, or a head that is more than a matrix; the labels do not fit the
            positions.
    """
    reason = _obstacle(model)
    if reason:
        raise ValueError(
            "fuse_linear_cross_entropy computes cross-entropy from the weight of a plain lm_head, but "
            f"{reason}: call model.set_runtime(fuse_linear_cross_entropy=False)"
        )
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    targets = shift_labels.reshape(-1).to(hidden_states.device)
    loss = linear_cross_entropy(hidden_states.reshape(-1, hidden_states.shape[-1]), model.lm_head.weight, targets)
    if num_items_in_batch is None:
        return loss / (targets != IGNORED).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def describe_loss(model: Any) -> str:
    """A line for `deltazoo.report`: how a causal language model computes its loss, and why."""
    way = "without the logits of all positions" if fuses_loss(model) else "from the logits of all positions"
    default = _obstacle(model) or f"default in {model.lm_head.weight.dtype}"
    return f"loss in training: {way} ({reason_for('fuse_linear_cross_entropy', model.runtime.given(), default)})"


def reason_for(option: str, asked: Mapping[str, Any], otherwise: str) -> str:
    """The reason for an option's value: the caller asked for it, or `otherwise`."""
    return f"{option}={asked[option]!r} was asked for" if option in asked else otherwise


def _obstacle(model: Any) -> str | None:
    """The reason why `loss_without_logits` does not compute the loss of a model; None if it does."""
    head = model.lm_head
    if model.loss_function is not ForCausalLMLoss:
        return f"the model's loss_function is {model.loss_function!r}"
    if type(head) is not nn.Linear:
        return f"lm_head is of {type(head)}"
    if head.bias is not None:
        return "lm_head has a bias"
    if isinstance(head.weight, DTensor):
        return "the weight of lm_head is spread over several devices"
    if is_hooked(head):
        return "lm_head has hooks"
    if type(head.weight) not in (nn.Parameter, Tensor):
        return f"the weight of lm_head is of {type(head.weight)}"
    return None
