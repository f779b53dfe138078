"""PGDN: Gated DeltaNet whose write key is scaled by a running second moment of the keys.

    A_t = exp(ga_t) A_{t-1} + ba_t k_t * k_t
    M_t = x^(-r / (1 + |r|)),     r = log(A_t + 1e-6) - c,     x = 1.5
    S_t = (I - beta_t (M_t * k_t) k_t^T) exp(g_t) S_{t-1} + beta_t (M_t * k_t) v_t^T

A diagonal preconditioner, as in second-order optimisation: channels in which keys have been small are written more
strongly, at most x times, and others less, at least 1 / x times. The moment A is a second state, one number per key
channel. Its decay ga and its step ba are one number per key head. With x = 1 it is Gated DeltaNet. This is the diagonal
form that the authors trained; the theory in the paper has the full inverse.

The authors' models have heads of 128, values as wide, and no output gate: 8 heads at width 1024, 14 at 1792. Models
saved with the earlier spec (revision 1: Gated DeltaNet's sizes and gate) load with it.

Safety: conditional. The erase gain reaches `beta x`. With `allow_neg_eigval` that would be 3, so beta is bounded to
keep it below 2 (flash-linear-attention has no such bound). The bound binds for ordinary gates, at 29% of the tokens for
a gate bias of 1 and at 83% for 2. There the eigenvalue is -1 and the gate learns nothing. No model of the authors has
this option.

Paper: arXiv:2604.21100; parameter names, c = -0.2 at the start and the constants are flash-linear-attention's.
"""

from dataclasses import replace

from deltazoo.rules.gated_deltanet import GATED_DELTANET
from deltazoo.spec import StepForm, register_rule

_FIRST = replace(
    GATED_DELTANET,
    name="pgdn",
    paper="Preconditioned DeltaNet, arXiv:2604.21100",
    summary="Gated DeltaNet whose write key is scaled per channel by a running second moment of the keys.",
    equation="S_t = (I - b_t (M_t * k_t) k_t^T) exp(g_t) S_{t-1} + b_t (M_t * k_t) v_t^T, "
    "M_t = 1.5^(-r / (1 + |r|)), r = log(A_t + 1e-6) - c, A_t = exp(ga_t) A_{t-1} + ba_t k_t * k_t",
    erase_key="separate",
    nonexpansive="conditional",
    hub_model_type="precond_gated_deltanet",
)
PGDN = register_rule(
    replace(_FIRST, output_gate="none", head_dim=128, expand_v=1.0, paper_shape={}, earlier=_FIRST),
    layer="deltazoo.rules.preconditioned_layer.Preconditioned",
    step_form=StepForm(
        keys="scaled",
        key_maps=("a_atk_proj", "b_atk_proj"),
        key_parameters=("A_log_atk", "dt_bias_atk", "log_atk_scale"),
    ),
)
