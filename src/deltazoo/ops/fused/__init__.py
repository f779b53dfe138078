"""Fused operations around the operator: short convolution, norms, rotary embedding, gates, SwiGLU and loss, each one
pass over memory.

The functions here check their arguments and run our Triton kernels; Triton is imported by the first call. `liger` has
Liger's kernels for norms, SwiGLU and the loss. `linear_cross_entropy` is the loss without the logits of all rows.
"""

from deltazoo.ops.fused.fused_functions import (
    FUSED_ACTIVATIONS,
    MOST_NORM_COLUMNS,
    fused_add_rms_norm,
    fused_cross_entropy_,
    fused_gated_rms_norm,
    fused_kernels_fit,
    fused_rms_norm,
    fused_rms_norm_linear,
    fused_rotary,
    fused_rule_keys,
    fused_scaled_key,
    fused_short_conv,
    fused_short_conv_step,
    fused_short_convs,
    fused_sigmoid_gate,
    fused_softplus_decay,
    fused_swiglu,
    fused_swiglu_linear,
    fused_weighted_squares,
)

__all__ = [
    "FUSED_ACTIVATIONS",
    "MOST_NORM_COLUMNS",
    "fused_add_rms_norm",
    "fused_cross_entropy_",
    "fused_gated_rms_norm",
    "fused_kernels_fit",
    "fused_rms_norm",
    "fused_rms_norm_linear",
    "fused_rotary",
    "fused_rule_keys",
    "fused_scaled_key",
    "fused_short_conv",
    "fused_short_conv_step",
    "fused_short_convs",
    "fused_sigmoid_gate",
    "fused_softplus_decay",
    "fused_swiglu",
    "fused_swiglu_linear",
    "fused_weighted_squares",
]
