"""`generate` of accelerated models: transformers' own loop, whose step is captured as in our models."""

from functools import cache
from typing import Any, ClassVar

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from deltazoo.generation.captured_generation import CapturedGeneration

__all__ = ["AcceleratedGeneration", "generating_class"]


_PICTURES = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw")
"""Arguments that say where in a prompt its pictures and videos are."""


class AcceleratedGeneration(CapturedGeneration):
    """What every subclass of `generating_class` adds to a model class of transformers."""

    original: ClassVar[type[Any]]
    """The class of transformers."""

    def prepare_cache(self, cache: Cache) -> None:
        """Leave the cache as it is: accelerated layers keep their states as the originals do."""

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As in the original, but a single token comes without the description of earlier pictures.

        Its positions are given. Older versions pass the description on, and one of its tensors grows with every token.
        """
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)  # type: ignore[misc]
        tokens = inputs.get("input_ids")
        if tokens is not None and tokens.shape[1] == 1 and inputs.get("position_ids") is not None:
            return {name: x for name, x in inputs.items() if name not in _PICTURES}
        return inputs

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by way of the original class: this one has its name, and no module holds it."""
        return _empty_model, (self.original,), vars(self)


def _empty_model(original: Any) -> Any:
    cls: Any = generating_class(original)
    return cls.__new__(cls)


@cache
def generating_class(original: Any) -> type[Any]:
    """A model class of transformers with captured steps in `generate`.

    It goes by the original's name, which transformers writes into saved configurations.
    """
    members = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases: tuple[type, ...] = (AcceleratedGeneration, original, GenerationMixin)
    return type(original.__name__, bases, {**members, "original": original})
