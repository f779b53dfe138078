"""DeltaNet with negative eigenvalues: a transition that can also reflect, and so keep track of a changing state.

    S_t = (I - 2 b_t k_t k_t^T) S_{t-1} + 2 b_t k_t v_t^T

With the doubled step the eigenvalue along the key is `1 - 2b`, in (-1, 1) instead of (0, 1). One layer then
solves parity and swaps, which no layer with positive eigenvalues can at any depth in finite precision. The paper's
equations double the erase term only, its code both terms; `neg_eigval` chooses, and small tests find both equally
good. `deltazoo.layers.bounded_step` keeps the state bounded if rounding has made keys too long.

Paper: Grazzi et al. 2024, arXiv:2411.12537.
Hub: loads as `delta_net` with `allow_neg_eigval: true`.
"""

from deltazoo.spec import RuleSpec, register_rule

NEG_DELTA_NET = register_rule(
    RuleSpec(
        name="neg_delta_net",
        paper="Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues, arXiv:2411.12537",
        summary="DeltaNet with the step size doubled, so that it can track states.",
        equation="S_t = (I - 2 b_t k_t k_t^T) S_{t-1} + 2 b_t k_t v_t^T",
        step_size="euler",
        allow_neg_eigval=True,
        paper_shape={"learning_rate": 3e-4},
    )
)
