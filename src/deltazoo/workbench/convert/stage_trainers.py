"""The three stages of a conversion as losses on the HF Trainer: align each layer, distil the whole, learn the text."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from deltazoo.swap.surgery import swapped_layers, unswap_attention
from deltazoo.swap.swapped_attention import SwappedAttention
from deltazoo.workbench.convert.conversion_config import StageConfig
from deltazoo.workbench.train.packed_rows import IGNORED
from deltazoo.workbench.train.trainer import PackedTrainer

__all__ = [
    "AlignmentTrainer",
    "DistillationTrainer",
    "FineTuningTrainer",
    "choose_trained_parameters",
    "original_of",
    "teacher_forced",
]


class FineTuningTrainer(PackedTrainer):
    """The stock loss: cross-entropy on text."""


class AlignmentTrainer(PackedTrainer):
    """Every swapped layer against the attention it replaces, all at once: one forward pass serves all layers.

    The loss is the relative squared error of a layer's output, averaged over the layers. No layer sees another's
    error, since the attentions' own outputs go on to the next layer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # the loss is a mean: accumulation divides it

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Mean relative error of the swapped layers on one batch."""
        model.eval()  # dropout in the frozen rest would only make targets noisy
        layers = swapped_layers(self._model).values()
        with teacher_forced(layers) as errors:
            model(**_without_labels(inputs), use_cache=False, logits_to_keep=1)
        return torch.stack(errors).mean()


class DistillationTrainer(PackedTrainer):
    """The original model's predictions: KL(original || model) in nats, mean over all tokens, temperature 1.

    With a ``text_weight``, so many times the cross-entropy on the text is added. The text says where the original is
    wrong; its predictions keep the noise of few tokens of text in bounds.
    """

    def __init__(self, *args: Any, original: PreTrainedModel, text_weight: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False
        self._original, self._text_weight = original, text_weight

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Mean divergence on one batch, and what the text adds."""
        labels, inputs = inputs["labels"], _without_labels(inputs)
        # The Trainer puts autocast around the model it trains alone.
        with torch.no_grad(), torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
            wanted = self._original(**inputs, use_cache=False).logits
        found = model(**inputs, use_cache=False).logits
        loss = divergence(found, wanted)
        return loss + self._text_weight * next_token_loss(found, labels) if self._text_weight else loss


@contextmanager
def teacher_forced(layers: Iterable[SwappedAttention]) -> Iterator[list[Tensor]]:
    """While open, each swapped layer hands on the output of its kept teacher, and notes its own relative error.

    Yields:
        the errors of the forward passes run so far, one scalar per layer and pass, with gradients for the new layers
        where gradients are recorded: ``|y - t|^2 / |t|^2`` over all tokens, ``t`` the teacher's output.

    Raises:
        ValueError: a layer was swapped without keeping its teacher.
    """
    layers = list(layers)
    alone = [layer.layer_idx for layer in layers if layer.teacher is None]
    if alone:
        raise ValueError(
            f"layers {alone} were swapped without keeping the original attention: swap with keep_teacher=True"
        )
    errors: list[Tensor] = []

    def hand_on(layer: SwappedAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        assert layer.teacher is not None
        with torch.no_grad():
            wanted = layer.teacher(*args, **kwargs)
        errors.append(relative_error(output[0], wanted[0]))
        return wanted

    handles = [layer.register_forward_hook(hand_on, with_kwargs=True) for layer in layers]
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
    """Cross-entropy of ``labels [B, T]`` under the logits ``[B, T, vocabulary]`` one place before, float32 nats.

    The mean over all labels that are not ``IGNORED``.
    """
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)


def choose_trained_parameters(model: PreTrainedModel, stage: StageConfig) -> None:
    """Let gradients reach what the stage trains and nothing else; kept teachers stay frozen in any case."""
    model.requires_grad_(stage.trains == "all")
    for layer in swapped_layers(model).values():
        layer.delta.requires_grad_(True)
        if layer.teacher is not None:
            layer.teacher.requires_grad_(False)


def original_of(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of a swapped model with its kept attentions back in place."""
    original = copy.deepcopy(model)
    unswap_attention(original)
    return original.requires_grad_(False).eval()


def _without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in inputs.items() if name != "labels"}
