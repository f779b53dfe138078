"""Fused operations around the operator: short convolution, norms, rotary embedding, gates, keys of some rules, a scan
over tokens, SwiGLU and loss, each one pass over memory.

A file holds one subject: its formula, its definition in torch, its kernels, and one function for each operation. The
function chooses between kernel and torch by its argument `fused`, that of `choice.takes_kernel`, and marks what a
backward pass computes again (`recomputable`). Callers write `from deltazoo.ops import fused` and `fused.rms_norm(...)`:
the first call imports the file, and with it Triton. So no file bears the name of a function.
"""

from deltazoo._lazy import lazy_names
from deltazoo.ops.fused.choice import FUSED_ACTIVATIONS, GATE_ACTIVATIONS, L2_NORM_EPS, MOST_COLUMNS, takes_kernel

__all__ = ["FUSED_ACTIVATIONS", "GATE_ACTIVATIONS", "L2_NORM_EPS", "MOST_COLUMNS", "takes_kernel"]

__getattr__ = lazy_names(
    __name__,
    {
        "gates": ("log_sigmoid_decay", "rate_and_logit", "sigmoid_gate", "softplus_log_decay"),
        "glu": ("swiglu", "swiglu_mlp"),
        "keys": ("comba_keys", "erase_gain", "q_delta_key", "qed_key", "squared_norm"),
        "loss": ("IGNORED", "linear_cross_entropy"),
        "moment": ("decayed_sum", "scaled_key", "takes_decayed_sum", "weighted_squares"),
        "norms": ("add_rms_norm", "gated_rms_norm", "l2_norm", "rms_norm"),
        "rotary": ("rotate",),
        "scan": ("token_scan",),
        "short_conv": (
            "causal_sum",
            "depthwise_sum",
            "is_silu",
            "short_convolution",
            "short_convolutions",
            "takes_joint_kernel",
        ),
        "short_conv_step": ("short_convolution_step",),
    },
)
