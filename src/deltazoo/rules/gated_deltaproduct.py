"""Gated DeltaProduct: Gated DeltaNet that takes several delta steps per token, each with a key and a value of its own.

    S_t = H_n ... H_1 exp(g_t) S_{t-1} + sum_j H_n ... H_{j+1} 2 b_j k_j v_j^T,     H_j = I - 2 b_j k_j k_j^T

A product of n reflections reaches every orthogonal matrix that moves at most n directions: two steps per token follow
permutations of three things in one layer, which one step cannot. The state decays before the first step and is read
after the last. `num_micro_steps`, 2 as in the authors' models, is n; with 1 this is `neg_gated_deltanet`. Without decay
it is DeltaProduct: `neg_delta_net` with `num_micro_steps=2`.

The state never grows by itself: the eigenvalues of every factor are in [-1, 1].

Paper: Siems et al. 2025, arXiv:2502.10297.
"""

from dataclasses import replace

from deltazoo.rules.neg_gated_deltanet import NEG_GATED_DELTANET
from deltazoo.spec import register_rule

GATED_DELTAPRODUCT = register_rule(
    replace(
        NEG_GATED_DELTANET,
        name="gated_deltaproduct",
        paper="DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products, arXiv:2502.10297",
        summary="Gated DeltaNet with several steps per token, each of size up to 2, so that it can track permutations.",
        equation=(
            "S_t = H_n ... H_1 exp(g_t) S_{t-1} + sum_j H_n ... H_{j+1} 2 b_j k_j v_j^T, H_j = (I - 2 b_j k_j k_j^T)"
        ),
        num_micro_steps=2,
        paper_shape={"num_heads": 3, "num_hidden_layers": 18},
        hub_model_type="gated_deltaproduct",
    )
)
