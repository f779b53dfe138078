"""EFLA, error-free linear attention: the delta rule's differential equation solved exactly over a time b.

    S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,     beta_t = (1 - exp(-b_t l_t)) / l_t,     l_t = |k_t|^2

DeltaNet takes one Euler step of `dS/dt = -k k^T S + k v^T`; this is the exact flow, with eigenvalue `exp(-b l)` in
(0, 1] for keys of any length. So the key is not normalised, and its length acts as a second step size; the query is
L2-normalised. The authors' code does not normalise the query, whose length the norm of the output removes, and it keeps
l from zero by a clamp and an added 1e-6, where we compute beta by a series. beta saturates as l grows, so EFLA needs a
larger learning rate than DeltaNet: compare both at both rates.

The start of the short convolutions decides how long keys are (docs/layers.md): at width 1024 the median of l is 4.8 and
that of the eigenvalue 0.09 here; 0.02 and 0.99 with `conv_initializer_range=0.02`.

Paper: arXiv:2512.12602.
"""

from deltazoo.spec import RuleSpec, register_rule

EFLA = register_rule(
    RuleSpec(
        name="efla",
        paper="Error-Free Linear Attention, arXiv:2512.12602",
        summary="DeltaNet with the exact step in place of Euler's, and keys of any length.",
        equation="S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, beta_t = (1 - exp(-b_t |k_t|^2)) / |k_t|^2",
        step_size="exact",
        normalize_k=False,
        paper_shape={"learning_rate": 3e-4},
        hub_model_type="efla",
    )
)
