"""Comba: Gated DeltaNet that erases what the state held before its decay, and corrects its read-out by the key.

    S_t = (exp(g_t) I - c beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,     o_t = S_t^T (q_t - d k_t)

`c = sigmoid(decay)` and `d = D` are one number per key head, 0.73 and 1 at the start. With c = exp(g) and d = 0 it is
Gated DeltaNet. The output gate is a sigmoid.

Safety: yes. The transition is symmetric with eigenvalues exp(g) and `exp(g) - c beta`, in (-1, 1]. A strong decay does
not clear the state along k, since the erase reads what was there before. `allow_neg_eigval` is refused: the eigenvalue
is negative already where `c beta > exp(g)`, and could reach -2.

There are two forms. `comba` is the paper's equation, in which the learned feedback c acts on the erase.
`comba_unit_erase` is the form of the authors' code (AwesomeSeq/Comba-triton), of flash-linear-attention's layer and of
checkpoints in its format: q, k and the erase key are L2-normalised last, so that c cancels in the erase and acts on the
query alone: `e = k`, `q = l2(q - d c k)` of the q and k before their norm.

D starts at 1 here and in flash-linear-attention, at 0.01 in the authors' code; their text has 0.02 for 340 M parameters
and 1 for 1.3 B. For 0.01: `torch.nn.init.constant_(layer.D, 0.01)`. The authors' model of 340 M has 4 heads of 256 at
width 1024, with values as wide as keys (`expand_v=1`).

Paper: arXiv:2506.02475. The equation is from an independent implementation and the kernels of flash-linear-attention.
"""

from dataclasses import replace

from deltazoo.spec import RuleSpec, StepForm, register_rule

COMBA = register_rule(
    RuleSpec(
        name="comba",
        paper="Comba: Improving Bilinear RNNs with Closed-loop Control, arXiv:2506.02475",
        summary="Gated DeltaNet that erases a learned share of the state before its decay, and reads by q - d k.",
        equation="S_t = (exp(g_t) I - c b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T, o_t = S_t^T (q_t - d k_t)",
        step_size="euler",
        decay="scalar",
        erase_key="separate",
        erase_reads="undecayed",
        output_gate="full",
        gate_activation="sigmoid",
        decay_rate_range=(0.0, 16.0),
        head_dim=256,
        expand_v=2.0,
        paper_shape={"num_heads": 3, "num_hidden_layers": 21},
    ),
    layer="deltazoo.rules.comba_layer.Comba",
    step_form=StepForm(keys="feedback", key_parameters=("decay", "D")),
    gain_at_most_one=True,
)
COMBA_UNIT_ERASE = register_rule(
    replace(
        COMBA,
        name="comba_unit_erase",
        summary="Comba in the form of its authors' code: the erase key is the unit key.",
        equation="S_t = (exp(g_t) I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T, o_t = S_t^T l2(q_t - d c k_t)",
        hub_model_type="comba",
    ),
    layer="deltazoo.rules.comba_layer.CombaUnitErase",
    step_form=StepForm(keys="unit_feedback", key_parameters=("decay", "D")),
    gain_at_most_one=True,
)
