"""The Triton kernels of `deltazoo.ops.fused`, each with its registration as an operator of torch."""

__all__ = ["REFUSAL"]

REFUSAL = ("a fused kernel", "set fused_kernels=False")
"""Arguments of `refuse_transforms` and `refuse_second_derivative`: what is unsupported, and what to do instead."""
