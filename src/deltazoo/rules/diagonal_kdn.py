"""Diagonal Kalman Delta Network: KDA whose write key is the gain of a Kalman filter with one variance per key channel.

    S_t = (I - G_t k_t^T) Diag(exp(g_t)) S_{t-1} + G_t v_t^T,     G_t = h_t * k_t / (r_t + sum_i h_ti k_ti^2)
    h_t = exp(2 g_t) p_{t-1} + w_t,     p_t = h_t / (1 + K h_t k_t^2 / r_t)

`isotropic_kdn` explains the terms. Here p, w and the gain are per key channel, w from a projection of low rank. The
operator gets as many key heads as value heads, since each value head has a gain of its own.

Safety: conditional. The write key is k times a positive factor per channel.

Paper: arXiv:2609.07816; the constants are those of the authors' code.
"""

from dataclasses import replace

from deltazoo.rules.kda import KDA
from deltazoo.spec import register_rule

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
