"""EFLA with a decay per head: the delta rule's differential equation solved exactly, from the decayed state.

    S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T,     beta_t = (1 - exp(-b_t |k_t|^2)) / |k_t|^2

Gated DeltaNet with the step size of `efla`, and keys of any length. The combination is ours: the paper's EFLA has no
decay. The layer is Gated DeltaNet's.

The state never grows by itself: the eigenvalue along the key is in (0, 1].

Papers: arXiv:2512.12602; Yang et al. 2024, arXiv:2412.06464.
"""

from dataclasses import replace

from deltazoo.rules.gated_deltanet import GATED_DELTANET
from deltazoo.spec import register_rule

GATED_EFLA = register_rule(
    replace(
        GATED_DELTANET,
        name="gated_efla",
        paper="Error-Free Linear Attention, arXiv:2512.12602",
        summary="Gated DeltaNet with the exact step in place of Euler's, and keys of any length.",
        equation=(
            "S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T, "
            "beta_t = (1 - exp(-b_t |k_t|^2)) / |k_t|^2"
        ),
        step_size="exact",
        normalize_k=False,
        hub_model_type=None,
    )
)
