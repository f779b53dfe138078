"""Longhorn's step: each token solves a small online regression exactly, between the new pair and the old state.

    S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,     beta_t = b_t / (1 + b_t |k_t|^2)

This is the implicit Euler step of the equation that EFLA solves exactly. Its eigenvalue `1 / (1 + b l)` is stable for
keys of any length, which therefore stay unnormalised. The published model replaces `k k^T` by its diagonal inside a
Mamba block, so its code is no delta rule; this is the paper's rule without that approximation, in the layer of all our
rules.

Paper: Liu et al. 2024, arXiv:2407.14207.
"""

from deltazoo.spec import RuleSpec, register_rule

LONGHORN = register_rule(
    RuleSpec(
        name="longhorn",
        paper="Longhorn: State Space Models are Amortized Online Learners, arXiv:2407.14207",
        summary="DeltaNet with the implicit step of online regression, and keys of any length.",
        equation="S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, beta_t = b_t / (1 + b_t |k_t|^2)",
        step_size="implicit",
        normalize_k=False,
        paper_shape={"learning_rate": 3e-4},
    )
)
