"""Q-Delta: Gated DeltaNet that corrects the state by the error of its key and of its query together.

    S_t = (I - beta_t k_t x_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T,     x_t = k_t + lambda_t q_t

The correction subtracts from the value what the state recalls under the key, plus lambda times what it recalls under
the query. `lambda = sigmoid(lamb_proj(x) - 0.9)` per token and key head is about 0.29 at the start; lambda = 0 is Gated
DeltaNet. With grouped value heads the authors' code has a lambda per value head, ours one per key head. Their code for
decoding leaves lambda out and does not normalise q and k; here decoding computes the function of training.
`allow_neg_eigval` is refused: the authors' code doubles lambda with it, and the erase gain `beta (1 + lambda k.q)`
could then be negative.

Safety: conditional with one decay per head as here, no with one per channel. The erase gain is in [0, 2].

Paper: arXiv:2606.08804, eq. 17 to 20. The offset 0.9 is the authors' code's; another is reported from the appendix.
"""

from deltazoo.spec import RuleSpec, StepForm, register_rule

Q_DELTA = register_rule(
    RuleSpec(
        name="q_delta",
        paper="Q-Delta: Beyond Key-Value Associative State Evolution, arXiv:2606.08804",
        summary="Gated DeltaNet that corrects by the error of key and query together.",
        equation="S_t = (I - b_t k_t x_t^T) exp(g_t) S_{t-1} + b_t k_t v_t^T, x_t = k_t + lambda_t q_t",
        step_size="euler",
        decay="scalar",
        erase_key="separate",
        nonexpansive="conditional",
        nonexpansive_per_channel="no",
        output_gate="full",
        gate_activation="silu",
        decay_rate_range=(0.0, 16.0),
        head_dim=128,
        expand_v=2.0,
        paper_shape={"num_heads": 6, "num_hidden_layers": 21},
    ),
    layer="deltazoo.rules.q_delta_layer.QDelta",
    step_form=StepForm(keys="query_share", key_maps=("lamb_proj",)),
)
