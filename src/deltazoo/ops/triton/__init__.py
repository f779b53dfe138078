"""The operator as Triton kernels. Other packages import this one inside functions, since Triton may be missing.

Only `deltazoo.ops.fused` and `deltazoo.ops.decoding`, which are also imported inside functions, import its launches and
operators directly.
"""
