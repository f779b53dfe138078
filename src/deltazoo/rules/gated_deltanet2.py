"""Gated DeltaNet-2: Kimi Delta Attention with a gate per key channel on the erase, and per value channel on the write.

    S_t = (I - k_t (b_t * k_t)^T) Diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T

KDA erases and writes with one number per head. Here b_t, one number per key channel, chooses what a token erases, and
w_t, one per value channel, what it writes; both are sigmoids of full projections of the input. With all channels equal
to one gate it is KDA. With grouped value heads b belongs to the key head, decay and w to the value head; the decay of
flash-linear-attention's layer belongs to the key head as well.

Safety: conditional. The erase gain `sum b k^2` is in [0, 1], but the erase key `b * k` is not parallel to k. One token
repeated can therefore let the state grow, by one over the cosine of the angle between the two keys (33-fold in 4,096
repeats in the tests), and a product of different tokens without bound. Decay bounds such models.

`allow_neg_eigval` doubles b alone, as in flash-linear-attention's layer, whose parameter names these are.

Paper: arXiv:2605.22791, eq. 8 to 10; exp(A_log) starts uniform on (1, 16].
"""

from deltazoo.spec import RuleSpec, StepForm, register_rule

GATED_DELTANET2 = register_rule(
    RuleSpec(
        name="gated_deltanet2",
        paper="Gated DeltaNet-2, arXiv:2605.22791",
        summary="KDA with a gate per key channel on what a token erases and one per value channel on what it writes.",
        equation="S_t = (I - k_t (b_t * k_t)^T) Diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T",
        step_size="euler",
        decay="channel",
        erase_key="separate",
        nonexpansive="conditional",
        output_gate="low_rank",
        gate_activation="sigmoid",
        decay_rate_range=(1.0, 16.0),
        paper_shape={"num_hidden_layers": 21},
    ),
    layer="deltazoo.rules.channel_gates.GatedDeltaNet2",
    step_form=StepForm(keys="gated", key_maps=("w_proj",)),
    gain_at_most_one=True,
)
