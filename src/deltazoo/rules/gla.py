"""Gated linear attention: linear attention with a decay of its own for every key channel.

    S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T,     g_t = logsigmoid(a_t) / 16

Nothing is erased: KDA is this with the correction term, `mamba2_style` with one decay per head. `a_t` comes out of a
projection of rank 16 with a bias, so decays start near `g = log(1/2) / 16`, and the division keeps them slow. The
published model has 4 heads, keys half and values as wide as the model, and no short convolution. Without convolutions
(`use_short_conv=False`) queries, keys and values have no activation either. The output is an RMSNorm per head times
SiLU of a full-rank gate.

The state never grows by itself: every factor is in (0, 1).

Paper: Yang et al. 2023, arXiv:2312.06635.
"""

from deltazoo.spec import RuleSpec, StepForm, register_rule

GLA = register_rule(
    RuleSpec(
        name="gla",
        paper="Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635",
        summary="Linear attention with one decay per key channel: forgets, but cannot overwrite.",
        equation="S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T",
        step_size="none",
        decay="channel",
        normalize_q=False,
        normalize_k=False,
        output_gate="full",
        gate_activation="silu",
        head_dim=256,
        expand_v=2.0,
        paper_shape={"head_dim": 128, "num_heads": 4, "use_short_conv": False},
        hub_model_type="gla",
    ),
    layer="deltazoo.rules.gla_layer.GatedLinearAttention",
    step_form=StepForm("log_sigmoid", "gk_proj"),
)
