"""The Triton kernels of `deltazoo.ops.fused`, each with its registration as an operator of torch."""

__all__ = ["L2_NORM_EPS", "REFUSAL"]

L2_NORM_EPS = 1e-6
"""Added to the squared length of a head that is divided by its L2 norm; in `rule_keys` and `token_rule` a literal."""

REFUSAL = ("a fused kernel", "set fused_kernels=False")
"""Arguments of `refuse_transforms` and `refuse_second_derivative`: what is unsupported, and what to do instead."""
