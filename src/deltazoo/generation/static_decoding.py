"""A static cache with the step of `model.generate` captured over it, for one set of arguments of `forward`."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, StaticCache, StaticLayer

from deltazoo.generation.step import CapturedStep

__all__ = ["StaticDecoding"]


class StaticDecoding:
    """A static cache and, once it is captured, the step over it.

    Args:
        cache: as `deltazoo.generation.static_cache.fixed_cache` makes it.
        rows: of the batch.
    """

    def __init__(self, cache: StaticCache, rows: int) -> None:
        self.cache = cache
        self.rows = rows
        lengths = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)]
        self.max_length = min(lengths, default=sys.maxsize)
        self.step: CapturedStep | None = None
        self._arguments: object = None

    def serves(self, model: Any, rows: int, max_length: int) -> bool:
        """Whether a new call can use the cache and the step that an earlier call captured."""
        fits = self.rows == rows and self.max_length >= max_length
        return fits and self.step is not None and self.step.is_valid_for(model)

    def has_step_for(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the captured step is one with such arguments; values of tensors may differ."""
        return self.step is not None and self._arguments == _without_values(arguments)

    def capture(self, model: Any, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Capture what `forward` does with one token and these arguments, whose tensors' values may change.

        Raises:
            RuntimeError: the step waits for the device, or memory runs out; there is no captured step then.
        """
        replaced, self.step = self.step, None  # kept until the end of the call: it owns the merged weights
        self._inputs = {name: x.clone() for name, x in _tensors_in(arguments).items()}
        fixed_arguments = _with_tensors(arguments, self._inputs)
        self.step = CapturedStep(model, lambda: forward(**fixed_arguments).logits, self.cache)
        self._arguments = _without_values(arguments)
        del replaced

    def replay(self, arguments: Mapping[str, Any]) -> Tensor:
        """The logits after one more token; the next replay overwrites them."""
        assert self.step is not None
        self.step.cache_tensors.put_back()
        for name, x in _tensors_in(arguments).items():
            self._inputs[name].copy_(x)
        self.step.replay()
        return self.step.output


def _tensors_in(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors among the arguments of a forward pass, those of a dict of masks included, by name."""
    found = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    masks = arguments.get("attention_mask")
    if isinstance(masks, Mapping):
        found |= {f"attention_mask.{name}": x for name, x in masks.items() if isinstance(x, Tensor)}
    return found


def _with_tensors(arguments: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same arguments with other tensors, named as `_tensors_in` does."""
    exchanged = {name: tensors.get(name, x) for name, x in arguments.items()}
    masks = arguments.get("attention_mask")
    if isinstance(masks, Mapping):
        exchanged["attention_mask"] = {name: tensors.get(f"attention_mask.{name}", x) for name, x in masks.items()}
    return exchanged


def _without_values(arguments: Mapping[str, Any]) -> object:
    """What must not change from one step to the next: kinds of tensors, and all other arguments but the cache."""
    kinds = {name: (x.shape, x.dtype, x.device) for name, x in _tensors_in(arguments).items()}
    others = {name: x for name, x in arguments.items() if not isinstance(x, Tensor | Mapping | Cache)}
    return kinds, others
