"""`generate` of accelerated models: transformers' own loop, whose step is captured as in our models."""

from functools import cache
from typing import Any, ClassVar

from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from deltazoo.generation.captured_generation import CapturedGeneration

__all__ = ["AcceleratedGeneration", "generating_class"]


class AcceleratedGeneration(CapturedGeneration):
    """What every subclass of `generating_class` adds to a model class of transformers."""

    original: ClassVar[type[Any]]
    """The class of transformers."""

    def prepare_cache(self, cache: Cache) -> None:
        """Leave the cache as it is: accelerated layers keep their states as the originals do."""

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
