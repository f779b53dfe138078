"""Momentum: Gated DeltaNet whose updates gather momentum, with a fixed share per head. MDN, restricted.

    M_t = a_t mu M_{t-1} + (1 - mu) b_t k_t (v_t - a_t S_{t-1}^T k_t)^T
    S_t = a_t S_{t-1} + M_t,     a_t = exp(g_t)

MDN has a momentum mu, a decay of S and a step for each token. There S and M act on each other in a way that one state
cannot hold. With one mu per head, a parameter, and a decay that both share, they are one state of twice as many key
channels, of which the second half decays by mu more: `S = A - mu R` with `R = M / (1 - mu)`, and

    write key [k; k]     erase key [k; -k]     query [q; -mu q]     step b     decay [a; mu a]

mu = 0 is Gated DeltaNet. With `1 - mu` in front of the step a value changes S by b in all, over several tokens. Without
it, as MDN may choose, the step is `b / (1 - mu)` in all: then random unit keys let the state grow to 1e49 in 3,000
tokens at mu = 0.9, where it stays at 42 here. Still updates of different tokens can add up: the rule is "conditional".
`allow_neg_eigval` is refused, since the kernels cannot tell large steps from the erase gain, which is zero.

Paper: arXiv:2605.05838, with its beta at 1, its eta at `(1 - mu) b` and mu_t = mu a_t; output correction and gate
constraints left out.
"""

from deltazoo.spec import RuleSpec, register_rule

MOMENTUM = register_rule(
    RuleSpec(
        name="momentum",
        paper="Momentum DeltaNet, restricted, arXiv:2605.05838",
        summary="Gated DeltaNet whose updates gather momentum, with a fixed share per head.",
        equation="M_t = a_t mu M_{t-1} + (1 - mu) b_t k_t (v_t - a_t S_{t-1}^T k_t)^T, S_t = a_t S_{t-1} + M_t, "
        "a_t = exp(g_t)",
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
    gain_at_most_one=True,
)
