"""Dtypes: those that kernels take, and those that are computed in."""

import torch
from torch import Tensor

__all__ = ["KERNEL_DTYPES", "at_least_float32", "wide_dtype"]

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What Triton kernels take for their inputs; they compute in float32."""


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in, which states have too: float64 if one of the tensors has it, otherwise float32."""
    return torch.float64 if torch.float64 in [x.dtype for x in tensors] else torch.float32


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32; float64 stays."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
