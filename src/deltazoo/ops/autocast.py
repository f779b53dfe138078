"""What autocast does to the inputs of a matrix product, for functions that multiply by other means."""

import torch
from torch import Tensor

__all__ = ["autocast_dtype", "cast_for_product"]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast has matrix products of this device computed; None if it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # "meta" has no autocast to ask
        return None
    return torch.get_autocast_dtype(device.type)


def cast_for_product(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype in which autocast, if it is on, would multiply them; float64 stays, with the others."""
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None or any(x.dtype == torch.float64 for x in tensors):
        return tensors
    return tuple([x.to(dtype) for x in tensors])
