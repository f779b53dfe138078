"""The operator as Triton kernels. What lies outside imports this package inside functions: Triton may be missing.

Only `deltazoo.ops.fused` and `deltazoo.ops.decoding`, which are imported in the same way, take its launches and
operators at once.
"""
