"""Lightning attention: linear attention with a fixed decay per head, as the MiniMax-01 models train it.

    S_t = exp(-s) S_{t-1} + k_t v_t^T,     s = 2^(-8 h / H) (1 - l / (L - 1) + 1e-5)

Head h of 1..H in layer l of 0..L-1 forgets at a rate s that nothing learns and no token changes: quickly in the first
heads, more slowly in the last ones and in deep layers. If H is no power of two, as in ALiBi and the authors' code: P
heads have the rates of P heads, for the largest power of two P below H, and the others the odd ones of 2 P heads.
`mamba2_style` has a decay that each token sets. Queries, keys and values are SiLU of their projections, queries are not
scaled, and the output is an RMSNorm times the sigmoid of a full-rank gate. A layer that does not know the number of
layers, on its own or swapped into another model, decays as the first layer does.

Models that were saved before this was corrected load as they were (revision 1): queries times K^-1/2, and the formula
above for any H.

MiniMax-01 has no short convolutions (`use_short_conv=False`), a norm over all heads where this one is per head, and
softmax attention in every eighth layer. Lightning Attention-2 computes the rule for any fixed decay. RetNet has other
fixed decays and rotates queries and keys: this is not RetNet.

The state never grows by itself: every factor is at most 1.

Papers: Qin et al. 2024, arXiv:2401.04658; MiniMax 2025, arXiv:2501.08313.
"""

from dataclasses import replace

from deltazoo.spec import RuleSpec, StepForm, register_rule

_FIRST = RuleSpec(
    name="lightning_attention",
    paper="Lightning Attention-2, arXiv:2401.04658",
    summary="Linear attention with a fixed decay per head and layer.",
    equation="S_t = exp(-s) S_{t-1} + k_t v_t^T, s = 2^(-8 h / H) (1 - l / (L - 1) + 1e-5)",
    step_size="none",
    decay="scalar",
    normalize_q=False,
    normalize_k=False,
    output_gate="full",
    gate_activation="sigmoid",
    paper_shape={"num_hidden_layers": 22, "use_short_conv": False},
)
LIGHTNING_ATTENTION = register_rule(
    replace(_FIRST, scale_queries=False, earlier=_FIRST),
    layer="deltazoo.rules.lightning_attention_layer.LightningAttention",
    step_form=StepForm("fixed"),
)
