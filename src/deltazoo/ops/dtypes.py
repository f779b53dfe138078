"""Dtypes: of the inputs of kernels, of computations, and of autocast's products."""

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the inputs of Triton kernels, which compute in float32."""


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of computations and of states: float64 if one of the tensors has it, otherwise float32."""
    return torch.float64 if torch.float64 in [x.dtype for x in tensors] else torch.float32


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32; float64 stays."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of matrix products under autocast on a device; None if autocast is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # "meta" has no autocast to ask
        return None
    return torch.get_autocast_dtype(device.type)


def cast_for_product(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype in which active autocast would multiply them; if one is float64, all stay unchanged."""
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None or any(x.dtype == torch.float64 for x in tensors):
        return tensors
    return tuple([x.to(dtype) for x in tensors])
