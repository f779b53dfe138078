"""deltazoo: the model zoo for delta-rule linear attention.

    S_t = (I - beta_t k_t k_t^T) D_t S_{t-1} + beta_t k_t v_t^T,     o_t = S_t^T q_t

One recurrence gives DeltaNet, Gated DeltaNet, EFLA, Longhorn, Kimi Delta Attention and their negative-eigenvalue forms.
Importing the package makes their models known to transformers' Auto classes.
"""

from deltazoo import variants as variants  # importing it registers the variants
from deltazoo._auto_registration import expect_model_types
from deltazoo.layers import report
from deltazoo.ops import DeltaRuleOutput, delta_rule, delta_rule_step, linear_attention, linear_attention_step
from deltazoo.spec import get_variant, list_variants, register_variant

__all__ = [
    "DeltaRuleOutput",
    "delta_rule",
    "delta_rule_step",
    "get_variant",
    "linear_attention",
    "linear_attention_step",
    "list_variants",
    "register_variant",
    "report",
]

__version__ = "0.1.0"

expect_model_types()
