"""The name by which transformers passes a cache: `cache` since 5.24, before it `past_key_values` and `cache_params`.

No other file of the package knows which version uses which.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any

import transformers
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg

__all__ = ["CACHE", "cache_in", "takes_cache"]

CACHE = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"
"""The argument of models and of transformers' functions, and the field of their outputs."""
_OLD_NAME = "past_key_values"
_NO_LONGER_TAKEN = "5.40.0"
"""The version of transformers that stops taking the old name."""


def takes_cache(old_name: str = _OLD_NAME) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for a method with the parameter `cache`, which gives it the name that transformers uses.

    Where that is `cache`, the old name is taken too, with transformers' own warning; both at once are a ValueError.
    Where it is the old one, `cache` is an argument that nobody knows.

    Args:
        old_name: the parameter's name before transformers 5.24.
    """
    if CACHE == "cache":
        return deprecate_kwarg(old_name, _NO_LONGER_TAKEN, new_name="cache", raise_if_both_names=True)

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            if "cache" in kwargs:
                raise TypeError(
                    f"{method.__name__}() got an unexpected argument 'cache': transformers {transformers.__version__} "
                    f"calls it {old_name!r}"
                )
            if old_name in kwargs:
                kwargs["cache"] = kwargs.pop(old_name)
            return method(*args, **kwargs)

        signature = inspect.signature(method)
        parameters = [p.replace(name=old_name) if p.name == "cache" else p for p in signature.parameters.values()]
        renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return renamed

    return decorate


def cache_in(arguments: Mapping[str, Any]) -> Cache | None:
    """The cache among a model's keyword arguments, under either name that this version of transformers takes.

    Raises:
        ValueError: there are two, of which transformers would use one.
    """
    cache, old = arguments.get(CACHE), arguments.get(_OLD_NAME)
    if cache is not None and old is not None and old is not cache:
        raise ValueError(f"{CACHE} and {_OLD_NAME} are two caches, and a model takes one: pass {CACHE} alone")
    return old if cache is None else cache
