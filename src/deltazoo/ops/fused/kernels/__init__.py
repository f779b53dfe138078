"""The Triton kernels of `deltazoo.ops.fused`, each with its registration as an operator of torch."""

__all__ = ["REFUSAL"]

REFUSAL = ("a fused kernel", "set fused_kernels=False")
"""What cannot do it, and what to do instead: for `refuse_transforms` and `refuse_second_derivative`."""
