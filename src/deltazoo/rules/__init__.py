"""The rules, one file each. Importing this package registers them, in the order in which they are listed.

A new rule needs one line here.
"""

# The imports register rules (F401), in the order of the list, which is not alphabetical (I001).
# ruff: noqa: F401, I001
from deltazoo.rules import (
    # No erase.
    linear_attention,
    lightning_attention,
    mamba2_style,
    gla,
    # Erase under the write key, with a step in [0, 1].
    delta_net,
    gated_deltanet,
    kda,
    fg2_gdn,
    # The step follows from the length of the key.
    efla,
    longhorn,
    gated_efla,
    gated_longhorn,
    kaczmarz,
    falcon,
    isotropic_kdn,
    # A step in [0, 2].
    neg_delta_net,
    neg_gated_deltanet,
    # Erase under another key.
    comba,
    diagonal_kdn,
    pgdn,
    pkda,
    q_delta,
    gated_deltanet2,
    qed,
    momentum,
    # Several steps per token.
    gated_deltaproduct,
    eda,
)
