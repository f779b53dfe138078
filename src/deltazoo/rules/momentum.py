"""Momentum, a restricted MDN: Gated DeltaNet whose updates gather momentum, with a fixed share per head.

    M_t = a_t mu M_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T
    S_t = a_t S_{t-1} + M_t,     a_t = exp(g_t)

MDN has a momentum mu, a decay of S and a step for each token. There S and M act on each other in a way that no single
state can hold. With one mu per head, a parameter, and a decay that both share, they are one state of twice as many key
channels, of which the second half decays by mu more: `S = A - mu R` with `R = M / (1 - mu)`, and

    write key [k; k]     erase key [k; -k]     query [q; -mu q]     step b / (1 - mu)     decay [a; mu a]

mu = 0 is Gated DeltaNet. A key repeated gives oscillations that shrink by sqrt(mu a) per token. Updates of different
tokens can add up: the rule is "conditional".

Paper: arXiv:2605.05838, with its beta at 1 and mu_t = mu a_t; output correction and gate constraints left out.
"""

from deltazoo.spec import RuleSpec, register_rule

MOMENTUM = register_rule(
    RuleSpec(
        name="momentum",
        paper="Momentum DeltaNet, restricted, arXiv:2605.05838",
        summary="Gated DeltaNet whose updates gather momentum, with a fixed share per head.",
        equation="M_t = a_t mu M_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T, S_t = a_t S_{t-1} + M_t, a_t = exp(g_t)",
        step_size="euler",
        decay="scalar",
        erase_key="separate",
        nonexpansive="conditional",
        scale_queries=False,
        output_gate="full",
        gate_activation="sigmoid",
        expand_v=2.0,
        paper_shape={"num_heads": 6, "num_hidden_layers": 21},
    ),
    layer="deltazoo.rules.momentum_layer.Momentum",
)
