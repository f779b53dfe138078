"""Kaczmarz linear attention: Gated DeltaNet that divides its step by the squared length of the key.

    S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T,     beta_t = b_t / (|k_t|^2 + 1e-6)

The gate b in (0, 1) is the share of the error under the key that a token removes, whatever the key's length: with b = 1
this is a projection of Kaczmarz. It is Gated DeltaNet on unit keys with values divided by the key's length, so a long
key stores a small value. Keys stay as they come out of convolution and SiLU, and queries are L2-normalised, the version
that the authors call by this name. As `|k|` goes to zero the write grows like `1 / |k|`, to `500 |v|` at most, and the
correction before it to `10^6 |v|`: with keys shorter than about 0.01 the kernels overflow in float16, so train and run
this rule in bfloat16 or float32.

The layer around it is NVlabs' Gated DeltaNet, with a bias on `b_proj` (`beta_bias=True`). Their model of 0.4 B
parameters has 12 heads of 96 at width 1536, with values twice as wide.

The state never grows by itself: the eigenvalue along the key is in (0, 1].

Paper: arXiv:2605.08587.
"""

from dataclasses import replace

from deltazoo.rules.gated_deltanet import GATED_DELTANET
from deltazoo.spec import register_rule

KACZMARZ = register_rule(
    replace(
        GATED_DELTANET,
        name="kaczmarz",
        paper="Kaczmarz Linear Attention, arXiv:2605.08587",
        summary="Gated DeltaNet with the step divided by the key's squared length, and keys of any length.",
        equation="S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T, beta_t = b_t / (|k_t|^2 + 1e-6)",
        step_size="kaczmarz",
        normalize_k=False,
        head_dim=96,
        paper_shape={"num_heads": 8, "num_hidden_layers": 21, "beta_bias": True},
        hub_model_type=None,
    )
)
