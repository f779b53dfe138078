"""Kalman Delta Networks: KDA that writes by the gain of a Kalman filter, which knows how sure the state is.

    S_t = (I - K_t k_t^T) Diag(exp(g_t)) S_{t-1} + K_t v_t^T
    h_t = exp(2 g_t) p_{t-1} + w_t              the variance of what is stored: it decays, and grows by w
    isotropic:  K_t = h_t k_t / (r_t + h_t |k_t|^2)                p_t = h_t / (1 + h_t |k_t|^2 / r_t)
    diagonal:   K_t = h_t * k_t / (r_t + sum_i h_ti k_ti^2)        p_t = h_t / (1 + K h_t k_t^2 / r_t)

p is a further state, one number per value head ("isotropic", with the mean of exp(2 g) over the head's K channels) or
one per key channel. The exact filter has a matrix there. What was stored often is sure, and a token changes it little.
The noise r of an observation, at least 0.01, and the noise w of the process are softplus functions of the token; p
starts at one over `softplus + 0.1` of a number per head, at first 1. A token's erase gain is below 1.

The layer around it is KDA, with a bias on the projection to r (`beta_bias=True` in the authors' models). With grouped
value heads, which their models do not have, each has a variance of its own.

Safety: the isotropic rule is "yes", the diagonal one "conditional", since its write key is k times a factor per
channel.

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

DIAGONAL_KDN = register_rule(
    replace(
        KDA,
        name="diagonal_kdn",
        paper="Kalman Delta Networks, diagonal, arXiv:2609.07816",
        summary="KDA whose write key is the gain of a Kalman filter with one variance per key channel.",
        equation="S_t = (I - G_t k_t^T) Diag(exp(g_t)) S_{t-1} + G_t v_t^T, G_t = h_t * k_t / (r_t + sum h_t k_t^2), "
        "h_t = exp(2 g_t) p_{t-1} + w_t, p_t = h_t / (1 + K h_t k_t^2 / r_t)",
        erase_key="separate",
        nonexpansive="conditional",
        hub_model_type=None,
    ),
    layer="deltazoo.rules.kdn_layer.DiagonalKDN",
)
