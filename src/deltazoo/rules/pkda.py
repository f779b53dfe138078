"""PKDA: Kimi Delta Attention whose write key is scaled by a running second moment of the keys.

    A_t = exp(ga_t) A_{t-1} + ba_t k_t * k_t
    M_t = x^(-r / (1 + |r|)),     r = log(A_t + 1e-6) - c,     x = 1.5
    S_t = (I - beta_t (M_t * k_t) k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t (M_t * k_t) v_t^T

This is PGDN (`pgdn` explains the terms) with KDA's decay per key channel and output gate. With x = 1 it is KDA. The
moment is kept per key head; flash-linear-attention, whose parameter names these are, keeps it per value head, which
differs only with grouped value heads. Decay rates start on (0, 16] as in the paper. The authors' models have 8 heads of
128 at width 1024, and 14 of 120 at 1792.

Safety: conditional, with the bound of PGDN (with `allow_neg_eigval` it binds at 43% of the tokens for a gate
bias of 1).

Paper: arXiv:2604.21100.
"""

from dataclasses import replace

from deltazoo.rules.kda import KDA
from deltazoo.rules.pgdn import PGDN
from deltazoo.spec import StepForm, register_rule

PKDA = register_rule(
    replace(
        KDA,
        name="pkda",
        paper=PGDN.paper,
        summary="KDA whose write key is scaled per channel by a running second moment of the keys.",
        equation=PGDN.equation.replace("exp(g_t)", "Diag(exp(g_t))"),
        erase_key="separate",
        nonexpansive="conditional",
        decay_rate_range=(0.0, 16.0),
        hub_model_type="precond_kda",
    ),
    layer="deltazoo.rules.preconditioned_layer.Preconditioned",
    step_form=StepForm(
        keys="scaled", key_maps=("a_proj", "b_atk_proj"), key_parameters=("A_log_atk", "dt_bias_atk", "log_atk_scale")
    ),
)
