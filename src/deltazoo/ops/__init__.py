"""The delta rule as an operator: `q, k, v, beta, log_decay` in, outputs and final state out.

`reference` is the definition (a loop over tokens), `chunkwise` the form in matrix products in plain torch, `triton` the
GPU kernels. All three share one contract (`api`), and none knows the name of a rule: layers compute before the operator
what tells the rules apart, by `step_size` and `decay`.
"""

from deltazoo.ops import decay, step_size
from deltazoo.ops.api import (
    DeltaRuleOutput,
    delta_rule,
    delta_rule_step,
    linear_attention,
    linear_attention_step,
)
from deltazoo.ops.backends import resolve_backend
from deltazoo.ops.context.group import ContextParallel
from deltazoo.ops.validation import check_values

__all__ = [
    "ContextParallel",
    "DeltaRuleOutput",
    "check_values",
    "decay",
    "delta_rule",
    "delta_rule_step",
    "linear_attention",
    "linear_attention_step",
    "resolve_backend",
    "step_size",
]
