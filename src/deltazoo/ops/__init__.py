"""The delta rule as an operator: `q, k, v, beta, log_decay` in, outputs and final state out.

`reference` is the definition (a loop over tokens), `chunkwise` the matmul-rich form in plain torch, `triton` the GPU
kernels. All three share one contract (`api`), and none knows the name of a rule: what tells the rules apart is
computed before the operator, in `step_size` and `decay`.
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
