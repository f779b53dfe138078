"""Kimi Delta Attention: Gated DeltaNet with a decay of its own for every key channel.

    S_t = (I - b_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + b_t k_t v_t^T,     g_t = -exp(A_log) softplus(a_t + dt_bias)

Decay first, then erase: written on the transposed state the same line reads `S Diag (I - b k k^T)`. `a_t` comes from a
projection of rank head_dim, A_log is one per head, dt_bias one per channel. The output is an RMSNorm per head times a
sigmoid of a low-rank gate (the paper finds SiLU there clearly worse). `decay_lower_bound=-5` gives the bounded gate of
the later released kernels.

Paper: Kimi Team 2025, arXiv:2510.26692; exp(A_log) starts uniform on (1, 16].
Hub: `kda` checkpoints.
"""

from deltazoo.spec import RuleSpec, register_rule

KDA = register_rule(
    RuleSpec(
        name="kda",
        paper="Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692",
        summary="Gated DeltaNet with one decay per key channel instead of one per head.",
        equation="S_t = (I - b_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + b_t k_t v_t^T",
        step_size="euler",
        decay="channel",
        output_gate="low_rank",
        gate_activation="sigmoid",
        decay_rate_range=(1.0, 16.0),
        hub_model_type="kda",
    )
)
