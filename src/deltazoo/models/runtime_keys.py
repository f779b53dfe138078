"""Runtime options among the keys of a configuration: left out of a saved one, refused from a caller.

A configuration says what a model is. How it runs is `deltazoo.runtime.RuntimeOptions`.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from deltazoo.runtime import RUNTIME_OPTIONS

__all__ = ["not_a_key", "without_runtime_options"]


def without_runtime_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` without the runtime options that older versions wrote into it; warns if it had any."""
    found = [key for key in RUNTIME_OPTIONS if key in values]
    if found:
        listed = ", ".join(f"{key}={values[key]!r}" for key in found)
        warnings.warn(
            f"the configuration holds {listed}, which say how a model runs, not what it is. They are ignored, and left "
            "out when the model is saved again; pass them to from_pretrained or model.set_runtime instead",
            stacklevel=2,
        )
    return {key: value for key, value in values.items() if key not in found}


def not_a_key(option: str) -> str:
    """The message for a caller who gives a runtime option to a configuration."""
    return (
        f"{option} says how a model runs, not what it is, and is no key of its configuration: pass it to "
        f"from_pretrained or to the model's constructor, or call model.set_runtime({option}=...)"
    )
