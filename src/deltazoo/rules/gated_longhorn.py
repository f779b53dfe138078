"""Longhorn's step with a decay per head: the implicit step of online regression, from the decayed state.

    S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T,     beta_t = b_t / (1 + b_t |k_t|^2)

Gated DeltaNet with the step size of `longhorn`, and keys of any length. No paper has it: the code of Gated DeltaNet
(NVlabs) and that of Kaczmarz linear attention offer this step beside their own, without figures. Theirs does not
normalise the query, whose length the norm of the output removes. The layer is Gated DeltaNet's.

The state never grows by itself: the eigenvalue along the key is in (0, 1].

Papers: Liu et al. 2024, arXiv:2407.14207; Yang et al. 2024, arXiv:2412.06464.
"""

from dataclasses import replace

from deltazoo.rules.gated_deltanet import GATED_DELTANET
from deltazoo.spec import register_rule

GATED_LONGHORN = register_rule(
    replace(
        GATED_DELTANET,
        name="gated_longhorn",
        paper="Longhorn: State Space Models are Amortized Online Learners, arXiv:2407.14207",
        summary="Gated DeltaNet with the implicit step of online regression, and keys of any length.",
        equation="S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T, beta_t = b_t / (1 + b_t |k_t|^2)",
        step_size="implicit",
        normalize_k=False,
        hub_model_type=None,
    )
)
