"""Falcon-1: Gated DeltaNet that stores a value under the key of the token before, by a normalised step with a ridge.

    S_t = (1 - eta_t lambda_t) S_{t-1} + eta_t x_t (v_t - S_{t-1}^T x_t)^T
    x_t = k_{t-1},     eta_t = b_t / (|x_t|^2 + lambda_t + 1e-6)

The key of the token before could predict the value, so the pair (k_{t-1}, v_t) is an example of the model's own task;
the first token of a sequence writes nothing. The step is Kaczmarz's, with the ridge lambda in the denominator, too, and
the state forgets the share `eta lambda`, at most 1 - 1e-6. Tokens read before the state forgets.

According to the paper b and lambda depend on the token; it does not say how. Here b is a sigmoid as in Gated DeltaNet,
and lambda the rate `exp(A_log) softplus(a + dt_bias)` of its decay. Keys and queries are L2-normalised ("Falcon-1.1"),
queries not scaled; the paper names no output gate. With b in (0, 1) the eigenvalues of a transition are in (0, 1].

Paper: arXiv:2608.27763, eq. 3.3 and 4.1 to 4.3.
"""

from deltazoo.spec import RuleSpec, register_rule

FALCON = register_rule(
    RuleSpec(
        name="falcon",
        paper="Fast Weight Attention (Falcon-1), arXiv:2608.27763",
        summary="Gated DeltaNet that stores values under the key of the token before, by a normalised step.",
        equation="S_t = (1 - eta_t lambda_t) S_{t-1} + eta_t x_t (v_t - S_{t-1}^T x_t)^T, x_t = k_{t-1}, "
        "eta_t = b_t / (|x_t|^2 + lambda_t + 1e-6)",
        step_size="euler",
        decay="scalar",
        erase_reads="undecayed",
        scale_queries=False,
    ),
    layer="deltazoo.rules.falcon_layer.Falcon",
    gain_at_most_one=True,
)
