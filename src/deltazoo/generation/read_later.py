"""Values of a device that the host reads once they are there, without waiting for what the device does afterwards."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["read_later"]


def read_later(x: Tensor) -> Callable[[], Tensor]:
    """Start copying a tensor to the host; the result, when called, waits for that copy alone and returns it.

    Args:
        x: may be overwritten by operations that follow.
    """
    if x.device.type != "cuda":
        copied = x.detach().clone()
        return lambda: copied
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(x.device))

    def wait() -> Tensor:
        arrived.synchronize()
        return host

    return wait
