"""Fused operations around the operator: short convolution, norms, rotary embedding, gates, keys of some rules, SwiGLU
and loss, each one pass over memory.

The functions here check their arguments and run our Triton kernels; Triton is imported by the first call. `liger` has
Liger's kernels for norms, SwiGLU and the loss. `linear_cross_entropy` is the loss without the logits of all rows.
"""

from deltazoo.ops.fused.fused_functions import *  # noqa: F403  (the names are listed there, once)
from deltazoo.ops.fused.fused_functions import __all__ as __all__
