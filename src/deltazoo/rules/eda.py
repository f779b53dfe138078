"""Erase-then-delta attention: Kimi Delta Attention that first erases under an address of its own, then writes.

    S_t = (I - b_t k_t k_t^T) (I - c_t e_t e_t^T) Diag(exp(g_t)) S_{t-1} + b_t k_t v_t^T

A delta rule corrects only what is stored under the key it writes to. Here a token first removes the share c_t of what
is stored under a second unit key e_t. With c = 0 it is KDA. These are two delta steps per token, and the first has the
value zero, so the operator needs no erase key. The decay gate is bounded,
`g = -5 (1 - exp(-exp(A_log) softplus(a + dt_bias) / 5))`.

The paper leaves some choices open, and its authors have published neither code nor weights. Our choices:

* e has no convolution and no activation before its L2 norm. It belongs to the key head, and c to the value head.
* e and the decay each come out of two linear maps with 16 channels per head between them. The paper gives the rank.
* The output gate is a full projection: with it and the decay's rank the layer has the parameters of the paper's tables.
  Models saved before the gate was corrected load with one of low rank, KDA's (revision 1).
* Gates start as in KDA, and the output gate is a sigmoid. `allow_neg_eigval` doubles b and not c.

The state never grows by itself: the eigenvalues of both factors are in [0, 1].

Paper: Li et al. 2026, arXiv:2606.26560, eq. 8 and 15.
"""

from dataclasses import replace

from deltazoo.rules.kda import KDA
from deltazoo.spec import StepForm, register_rule

_FIRST = replace(
    KDA,
    name="eda",
    paper="Erase-then-Delta Attention, arXiv:2606.26560",
    summary="KDA that first erases under a second key of its own, with a bounded decay.",
    equation="S_t = (I - b_t k_t k_t^T) (I - c_t e_t e_t^T) Diag(exp(g_t)) S_{t-1} + b_t k_t v_t^T",
    decay_gate="saturating",
    num_micro_steps=2,
    paper_shape={"num_hidden_layers": 22},
    hub_model_type=None,
)
EDA = register_rule(
    replace(_FIRST, output_gate="full", earlier=_FIRST),
    layer="deltazoo.rules.eda_layer.EraseThenDeltaAttention",
    step_form=StepForm(keys="erase_first", key_maps=("erase_b_proj",), first_key="erase_proj"),
    gain_at_most_one=True,
)
