"""Isotropic Kalman Delta Network: KDA whose step is the gain of a Kalman filter with one variance per head.

    S_t = (I - b_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + b_t k_t v_t^T,     b_t = h_t / (r_t + h_t |k_t|^2)
    h_t = mean(exp(2 g_t)) p_{t-1} + w_t,     p_t = h_t / (1 + h_t |k_t|^2 / r_t)

p is the variance of what the state holds, a further state, one number per value head; the exact filter has a matrix.
It decays with the state, grows by the noise w of the process, and shrinks with every observation: the more tokens have
written, the less a further token changes. The noise r of an observation, at least 0.01, and w are softplus functions of
the token; p starts at `1 / (softplus(c) + 0.1)` with a parameter c per head, which a new model sets so that p starts at
1. A token's erase gain is below 1.

The layer around it is KDA, with a bias on the projection to r (`beta_bias=True` in the authors' models). With grouped
value heads, which their models do not have, each has a variance of its own.

The state never grows by itself: the eigenvalue along the key is in (0, 1].

Paper: arXiv:2609.07816; the constants are those of the authors' code.
"""

from dataclasses import replace

from deltazoo.rules.kda import KDA
from deltazoo.spec import register_rule

ISOTROPIC_KDN = register_rule(
    replace(
        KDA,
        name="isotropic_kdn",
        paper="Kalman Delta Networks, isotropic, arXiv:2609.07816",
        summary="KDA whose step is the gain of a Kalman filter with one variance per head.",
        equation="S_t = (I - b_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + b_t k_t v_t^T, b_t = h_t / (r_t + h_t |k_t|^2), "
        "h_t = mean(exp(2 g_t)) p_{t-1} + w_t, p_t = h_t / (1 + h_t |k_t|^2 / r_t)",
        hub_model_type=None,
    ),
    layer="deltazoo.rules.kdn_layer.IsotropicKDN",
    gain_at_most_one=True,
)
