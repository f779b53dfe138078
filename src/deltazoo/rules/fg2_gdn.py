"""FG2-GDN: Kimi Delta Attention with a step size of its own for every channel of key and value.

    S_t = (I - k~_t k~_t^T) Diag(exp(g_t)) S_{t-1} + k~_t v~_t^T,     k~ = sqrt(b) * k,     v~ = sqrt(w) * v

b_t, one number per key channel, and w_t, one per value channel, are sigmoids of projections of the input. With all
channels of both equal to one gate it is KDA. Gated DeltaNet-2 puts its gate on the erase key alone. Here the same gated
key erases and writes, so the transition stays symmetric.

This is the paper's FG2-GDN+; its FG2-GDN has w = b, with values as wide as keys. It may differ from the authors' model:
the form `k~, v~` is known from a reimplementation, the square root from one reading of the paper, and full projections
without bias for b and w, as in Gated DeltaNet-2, are our choice.

The state never grows by itself: the eigenvalue along k~ is in [0, 1], since `|k~| <= 1`. `allow_neg_eigval` doubles b,
and with `neg_eigval="both"` w too.

Paper: arXiv:2604.19021, eq. 10 to 14.
"""

from dataclasses import replace

from deltazoo.rules.kda import KDA
from deltazoo.spec import StepForm, register_rule

FG2_GDN = register_rule(
    replace(
        KDA,
        name="fg2_gdn",
        paper="FG2-GDN: Doubly Fine-Grained Control, arXiv:2604.19021",
        summary="KDA with a step size per key channel and one per value channel.",
        equation=(
            "S_t = (I - k~_t k~_t^T) Diag(exp(g_t)) S_{t-1} + k~_t v~_t^T, "
            "k~_t = sqrt(b_t) * k_t, v~_t = sqrt(w_t) * v_t"
        ),
        hub_model_type=None,
        paper_shape={"num_hidden_layers": 20},
    ),
    layer="deltazoo.rules.channel_gates.FG2GatedDeltaNet",
    step_form=StepForm(keys="roots", key_maps=("w_proj",)),
    gain_at_most_one=True,
)
