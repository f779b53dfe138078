"""Gated DeltaNet: the delta rule on a state that decays, with one gate per head.

    S_t = (I - b_t k_t k_t^T) exp(g_t) S_{t-1} + b_t k_t v_t^T,     g_t = -exp(A_log) softplus(a_t + dt_bias)

DeltaNet overwrites one key at a time; the gate can also clear the whole state at once. The output is an RMSNorm per
head times SiLU of a full-rank gate. Two shapes are in use: heads of 256 with values twice as wide (6 heads at width
2048; the default here and in the Hub configs), and the authors' 9 heads of 192 with `expand_v` 2 and a bias on
`b_proj` for their 1.3B model.

Paper: Yang et al. 2024, arXiv:2412.06464; exp(A_log) starts uniform on (0, 16].
Hub: fla-hub/gated_deltanet-*.
"""

from deltazoo.spec import DeltaRuleSpec, register_variant

GATED_DELTANET = register_variant(
    DeltaRuleSpec(
        name="gated_deltanet",
        paper="Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464",
        summary="DeltaNet that can also forget, through one decay per head.",
        equation="S_t = (I - b_t k_t k_t^T) exp(g_t) S_{t-1} + b_t k_t v_t^T",
        step_size="euler",
        decay="scalar",
        output_gate="full",
        gate_activation="silu",
        decay_rate_range=(0.0, 16.0),
        head_dim=256,
        expand_v=2.0,
        hub_model_type="gated_deltanet",
    )
)
