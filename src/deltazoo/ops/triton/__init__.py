"""The operator as Triton kernels. What lies outside imports this package inside functions: Triton may be missing.

Only `deltazoo.ops.fused.kernels`, which is imported in the same way, takes its launches and operators at once.
"""
