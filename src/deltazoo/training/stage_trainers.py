"""Trainers and losses of two stages: align each layer, distil the original model. The third, on text, has Trainer's."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from deltazoo.swap.layer import SwappedAttention, swapped_layers
from deltazoo.swap.surgery import unswap_attention
from deltazoo.training.conversion_config import StageConfig
from deltazoo.training.tokens import IGNORED
from deltazoo.training.trainer import PackedTrainer

__all__ = [
    "AlignmentTrainer",
    "DistillationTrainer",
    "choose_trained_parameters",
    "original_of",
    "teacher_forced",
]


class AlignmentTrainer(PackedTrainer):
    """Trains every swapped layer to the output of the attention it replaces, all layers in one forward pass.

    The loss is the relative squared error of a layer's output, averaged over the layers. Errors do not add up from
    layer to layer, because the next layer gets the original attention's output.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # the loss is a mean, so accumulation must divide it

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Mean relative error of the swapped layers on one batch."""
        model.eval()  # dropout in the frozen layers would only add noise to the targets
        layers = swapped_layers(self._model).values()
        with teacher_forced(layers) as errors:
            model(**_without_labels(inputs), use_cache=False, logits_to_keep=1)
        return torch.stack(errors).mean()


class DistillationTrainer(PackedTrainer):
    """Trains to the original model's predictions: KL(original || model) in nats, mean over tokens, temperature 1.

    ``text_weight`` times the cross-entropy on the text is added. The text corrects errors of the original model; the
    original's predictions are less noisy than a small amount of text.
    """

    def __init__(self, *args: Any, original: PreTrainedModel, text_weight: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False
        self._original, self._text_weight = original, text_weight

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Mean divergence on one batch, plus the weighted loss on text."""
        labels, inputs = inputs["labels"], _without_labels(inputs)
        # The Trainer applies autocast only to the model it trains.
        with torch.no_grad(), torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
            wanted = self._original(**inputs, use_cache=False).logits
        found = model(**inputs, use_cache=False).logits
        loss = divergence(found, wanted)
        return loss + self._text_weight * next_token_loss(found, labels) if self._text_weight else loss


@contextmanager
def teacher_forced(layers: Iterable[SwappedAttention]) -> Iterator[list[Tensor]]:
    """Inside, each swapped layer returns the output of its kept teacher and records its own relative error.

    Yields:
        the errors ``|y - t|^2 / |t|^2`` of the forward passes so far, over all tokens, ``t`` the teacher's output: one
        scalar per layer and pass, differentiable in the new layers' parameters.

    Raises:
        ValueError: a layer was swapped without keeping its teacher.
    """
    layers = list(layers)
    without = [layer.layer_idx for layer in layers if layer.teacher is None]
    if without:
        raise ValueError(
            f"layers {without} were swapped without keeping the original attention: swap with keep_teacher=True"
        )
    errors: list[Tensor] = []

    def use_teacher_output(layer: SwappedAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        assert layer.teacher is not None
        with torch.no_grad():
            wanted = layer.teacher(*args, **kwargs)
        errors.append(relative_error(output[0], wanted[0]))
        return wanted

    handles = [layer.register_forward_hook(use_teacher_output, with_kwargs=True) for layer in layers]
    try:
        yield errors
    finally:
        for handle in handles:
            handle.remove()


def relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    """``|found - wanted|^2 / |wanted|^2`` over all elements, in float32."""
    found, wanted = found.float(), wanted.float()
    return (found - wanted).square().sum() / wanted.square().sum()


def divergence(found: Tensor, wanted: Tensor) -> Tensor:
    """KL(wanted || found) of two sets of logits ``[B, T, vocabulary]``: nats, mean over B and T, in float32."""
    found, wanted = (F.log_softmax(logits.float().flatten(0, 1), dim=-1) for logits in (found, wanted))
    return F.kl_div(found, wanted, log_target=True, reduction="batchmean")


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of ``labels [B, T]`` under ``logits [B, T, vocabulary]`` of the previous position, float32 nats.

    The mean over all labels that are not ``IGNORED``.
    """
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)


def choose_trained_parameters(model: PreTrainedModel, stage: StageConfig) -> None:
    """Set ``requires_grad`` for the parameters that the stage trains; kept teachers are always frozen."""
    model.requires_grad_(stage.trains == "all")
    for layer in swapped_layers(model).values():
        layer.delta.requires_grad_(True)
        if layer.teacher is not None:
            layer.teacher.requires_grad_(False)


def original_of(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of a swapped model with its original attention restored."""
    original = copy.deepcopy(model)
    unswap_attention(original)
    return original.requires_grad_(False).eval()


def _without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in inputs.items() if name != "labels"}
