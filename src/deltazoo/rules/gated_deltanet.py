"""Gated DeltaNet: the delta rule on a state that decays, with one gate per head.

    S_t = (I - b_t k_t k_t^T) exp(g_t) S_{t-1} + b_t k_t v_t^T,     g_t = -exp(A_log) softplus(a_t + dt_bias)

DeltaNet overwrites one key at a time; the gate can also clear the whole state at once. The output is an RMSNorm per
head times SiLU of a full-rank gate. Two shapes are in use: heads of 256 with values twice as wide (6 heads at width
2048; the default here and in the Hub configs), and the authors' 9 heads with `expand_v` 2 and a bias on `b_proj`: heads
of 200 in their model of 1.3 B parameters (width 2400), of 192 in its hybrid with softmax attention (width 2304).

Paper: Yang et al. 2024, arXiv:2412.06464; exp(A_log) starts uniform on (0, 16].
Hub: fla-hub/gated_deltanet-*.
"""

from deltazoo.spec import RuleSpec, register_rule

GATED_DELTANET = register_rule(
    RuleSpec(
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
        paper_shape={"num_heads": 3, "num_hidden_layers": 21},
        hub_model_type="gated_deltanet",
    )
)
