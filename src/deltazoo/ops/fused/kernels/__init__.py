"""The Triton kernels of `deltazoo.ops.fused`, each with its registration as an operator of torch."""
