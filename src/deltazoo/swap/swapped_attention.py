"""The module in the attention slot of a swapped layer: a delta-rule layer, called as the original attention was."""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn
from transformers.cache_utils import Cache

from deltazoo.generation.cache import CacheStates, prepare_cache_layer
from deltazoo.generation.cache_argument import takes_cache
from deltazoo.layers.batch_description import PACKING_ARGUMENTS, BatchDescription
from deltazoo.layers.rotary import Rotary
from deltazoo.layers.sequences import WHOLE_ROWS
from deltazoo.models.forward_arguments import refuse_dropped
from deltazoo.swap.drop_in_layer import DropInDeltaAttention
from deltazoo.swap.families import ModelFamily

__all__ = ["SwappedAttention"]

_LEFT_TO_THE_MODEL = ("position_ids", "use_cache", "output_router_logits")
"""Arguments of softmax attention that say nothing to a delta-rule layer that `delta_batch` does not say."""


class SwappedAttention(nn.Module):
    """A delta-rule layer that is called like the attention it replaces.

    Args:
        delta: the delta-rule layer.
        family: of the model, which says how attention is called.
        layer_idx: the layer's number in the model and its cache.
        rope: apply the model's rotary embedding to queries and keys.
        teacher: the attention module that was replaced, kept for distillation and `unswap_attention`; not part of
            parameters and checkpoints.
    """

    def __init__(
        self,
        delta: DropInDeltaAttention,
        family: ModelFamily,
        layer_idx: int,
        *,
        rope: bool,
        teacher: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.delta = delta
        self.layer_idx = layer_idx
        self.rope = rope
        self._cache_argument = family.cache_argument
        # In a tuple, where nn.Module does not look for parameters.
        self._teacher: tuple[nn.Module, ...] = () if teacher is None else (teacher,)

    @property
    def teacher(self) -> nn.Module | None:
        """The softmax attention that was replaced, called as before; None unless kept."""
        return self._teacher[0] if self._teacher else None

    def freeze_teacher(self) -> None:
        """Stop gradients and dropout of a kept teacher, and remember which parameters were trainable."""
        for teacher in self._teacher:
            self._trainable = {name: p.requires_grad for name, p in teacher.named_parameters()}
            teacher.requires_grad_(False).eval()

    def release_teacher(self) -> nn.Module:
        """The teacher as it was before `freeze_teacher`, to be put back in its slot."""
        (teacher,) = self._teacher
        for name, parameter in teacher.named_parameters():
            parameter.requires_grad_(self._trainable[name])
        return teacher.train(self.training)

    @takes_cache()
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotary | None = None,
        attention_mask: Any = None,
        cache: Cache | None = None,
        delta_batch: BatchDescription | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Mix tokens by the delta rule.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            position_embeddings: the model's cosines and sines `[B or 1, T, d]`.
            attention_mask: the model's mask over pairs of tokens, which a recurrence does not use; padding and packing
                come in `delta_batch`.
            cache: of the model; the layer's state goes into it.
            delta_batch: as the base model describes it to its swapped layers; None: every row is one whole sequence.
            kwargs: further arguments of the model, and the cache where the family calls it by another name.

        Returns:
            `[B, T, hidden_size]`, and None in place of attention weights.

        Raises:
            ValueError: a mask or packed documents that no `delta_batch` describes.
            TypeError: an argument that the layer does not know.
        """
        if cache is None and self._cache_argument is not None:
            cache = kwargs.pop(self._cache_argument, None)
        refuse_dropped(self, kwargs, _LEFT_TO_THE_MODEL)
        if delta_batch is None:
            telling = {"attention_mask": attention_mask, **{name: kwargs.get(name) for name in PACKING_ARGUMENTS}}
            told = [name for name, value in telling.items() if value is not None]
            if told:
                raise ValueError(
                    f"{type(self).__name__} was given {', '.join(told)}, and no model around it has described the "
                    "batch in delta_batch: call the whole model"
                )
        rotary = position_embeddings if self.rope else None
        sequences = WHOLE_ROWS if delta_batch is None else delta_batch.sequences
        if cache is None or (delta_batch is not None and delta_batch.packed):
            return self.delta(hidden_states, sequences=sequences, rotary=rotary), None
        prepare_cache_layer(cache, self.layer_idx)
        states = CacheStates(cache)
        return self.delta(hidden_states, past_key_values=states, sequences=sequences, rotary=rotary), None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the teacher too, whose parameters are not the module's."""
        for teacher in self._teacher:
            teacher._apply(fn)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """Layer number and options, for printing."""
        return f"layer_idx={self.layer_idx}, rope={self.rope}, teacher={'kept' if self._teacher else None}"
