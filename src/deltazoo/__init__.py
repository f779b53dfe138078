"""deltazoo: the model zoo for delta-rule linear attention.

    S_t = (I - beta_t k_t k_t^T) D_t S_{t-1} + beta_t k_t v_t^T,     o_t = S_t^T q_t

One recurrence gives DeltaNet, Gated DeltaNet, EFLA, Longhorn, Kimi Delta Attention and their negative-eigenvalue forms.
Importing the package makes their models known to transformers' Auto classes.
"""

import importlib
from typing import TYPE_CHECKING, Any

from deltazoo import variants as variants  # importing it registers the variants
from deltazoo._auto_registration import expect_model_types
from deltazoo.layers import report
from deltazoo.ops import DeltaRuleOutput, delta_rule, delta_rule_step, linear_attention, linear_attention_step
from deltazoo.spec import get_variant, list_variants, register_variant

if TYPE_CHECKING:
    from deltazoo.acceleration import accelerate as accelerate
    from deltazoo.acceleration import restore as restore
    from deltazoo.generation import generate as generate
    from deltazoo.swap import swap_attention as swap_attention
    from deltazoo.swap import unswap_attention as unswap_attention

__all__ = [
    "DeltaRuleOutput",
    "accelerate",
    "delta_rule",
    "delta_rule_step",
    "generate",
    "get_variant",
    "linear_attention",
    "linear_attention_step",
    "list_variants",
    "register_variant",
    "report",
    "restore",
    "swap_attention",
    "unswap_attention",
]

__version__ = "0.1.0"

_NEED_TRANSFORMERS = {
    "accelerate": "deltazoo.acceleration",
    "generate": "deltazoo.generation",
    "restore": "deltazoo.acceleration",
    "swap_attention": "deltazoo.swap",
    "unswap_attention": "deltazoo.swap",
}
"""Public functions by the module that is imported when one is first asked for."""


def __getattr__(name: str) -> Any:
    if name in _NEED_TRANSFORMERS:
        return getattr(importlib.import_module(_NEED_TRANSFORMERS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


expect_model_types()
