"""Gated DeltaNet with negative eigenvalues: forgets like Gated DeltaNet, reflects like negative-eigenvalue DeltaNet.

    S_t = (I - 2 b_t k_t k_t^T) exp(g_t) S_{t-1} + 2 b_t k_t v_t^T

This is Gated DeltaNet with the step doubled. A tracked state lasts less long than without decay, since the gate has to
learn to stay at exactly one.

Papers: Yang et al. 2024, arXiv:2412.06464; Grazzi et al. 2024, arXiv:2411.12537.
Hub: loads as `gated_deltanet` with `allow_neg_eigval: true`.
"""

from dataclasses import replace

from deltazoo.rules.gated_deltanet import GATED_DELTANET
from deltazoo.spec import register_rule

NEG_GATED_DELTANET = register_rule(
    replace(
        GATED_DELTANET,
        name="neg_gated_deltanet",
        paper="Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues, arXiv:2411.12537",
        summary="Gated DeltaNet with the step size doubled, so that it can track states.",
        equation="S_t = (I - 2 b_t k_t k_t^T) exp(g_t) S_{t-1} + 2 b_t k_t v_t^T",
        allow_neg_eigval=True,
        hub_model_type=None,
    )
)
