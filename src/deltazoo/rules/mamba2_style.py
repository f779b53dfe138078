"""Mamba2-style linear attention: adds without erasing, but forgets through one decay per head.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T,     g_t = -exp(A_log) softplus(a_t + dt_bias)

This is linear attention with the gate of Gated DeltaNet, or Gated DeltaNet without the correction term. It keeps the
layer of all our rules, so that comparisons change the rule alone: Mamba2 itself also scales the value by the step
`softplus(a_t + dt_bias)`, shares q and k (its C and B) among heads, and adds a skip `D x`. The gate's initial values
and the SiLU-gated output norm are those of Mamba2.

Paper: Dao and Gu 2024, arXiv:2405.21060.
"""

from deltazoo.spec import RuleSpec, register_rule

MAMBA2_STYLE = register_rule(
    RuleSpec(
        name="mamba2_style",
        paper="Transformers are SSMs (Mamba2), arXiv:2405.21060",
        summary="Linear attention with one decay per head: forgets, but cannot overwrite.",
        equation="S_t = exp(g_t) S_{t-1} + k_t v_t^T",
        step_size="none",
        decay="scalar",
        normalize_q=False,
        normalize_k=False,
        output_gate="full",
        decay_rate_range=(1.0, 16.0),
        paper_shape={"head_dim": 256, "expand_v": 2.0, "num_heads": 3, "num_hidden_layers": 21},
    )
)
