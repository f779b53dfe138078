"""flash-linear-attention's functions and modules under their names and signatures, computed by our operators.

    from deltazoo.compat.fla import chunk_gated_delta_rule  # was: from fla.ops.gated_delta_rule import ...

Arguments, their meanings and the results are those of flash-linear-attention 0.6; modules have its parameters' names.
docs/other_libraries.md lists what differs. The package `fla` is not needed, imported or replaced.
"""

from deltazoo.compat.fla.functions import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_kda,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    fused_recurrent_kda,
)
from deltazoo.compat.fla.modules import FusedRMSNormGated, RMSNorm, ShortConvolution, causal_conv1d, l2norm

__all__ = [
    "FusedRMSNormGated",
    "RMSNorm",
    "ShortConvolution",
    "causal_conv1d",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "l2norm",
]
