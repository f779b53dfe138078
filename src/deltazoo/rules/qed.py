"""QED: Gated DeltaNet-2 that also erases in a direction computed from the query.

    S_t = (I - k_t a_t^T) Diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T
    a_t = b_t * k_t + lambda (I - k_t k_t^T) (b_t * q_t),     lambda = sigmoid(theta) / 4

Gated DeltaNet-2 erases the value that the state holds under `b * k`. QED adds the part of the gated query that is
orthogonal to the key, so the erase gain stays that of Gated DeltaNet-2. theta is one number per key head and starts at
-2 (lambda = 0.03); lambda = 0 is Gated DeltaNet-2. The paper trains theta with ten times the learning rate, for which
it needs a parameter group of its own.

Safety: no, with a decay per channel as here. Where some `a_i k_i < 0` even one token repeated can grow, by 1.07 per
token in the tests' example. With one decay per head it is conditional.

Paper: arXiv:2608.13668, eq. 6 and appendix A, as two independent readings report it; no code of the authors is known.
"""

from dataclasses import replace

from deltazoo.rules.gated_deltanet2 import GATED_DELTANET2
from deltazoo.spec import StepForm, register_rule

QED = register_rule(
    replace(
        GATED_DELTANET2,
        name="qed",
        paper="QED, arXiv:2608.13668",
        summary="Gated DeltaNet-2 that also erases in a direction computed from the query.",
        equation="S_t = (I - k_t a_t^T) Diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T, "
        "a_t = b_t * k_t + lambda (I - k_t k_t^T) (b_t * q_t)",
        nonexpansive_per_channel="no",
    ),
    layer="deltazoo.rules.channel_gates.QED",
    step_form=StepForm(keys="gated_query", key_maps=("w_proj",), key_parameters=("theta",)),
)
