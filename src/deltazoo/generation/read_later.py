"""Waiting for the work that a device has been given so far, and not for what it is given afterwards."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["read_later", "wait_for"]


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
    wait = wait_for(x.device)

    def read() -> Tensor:
        wait()
        return host

    return read


def wait_for(device: torch.device) -> Callable[[], None]:
    """A function that waits for what the device has been given until now."""
    if device.type != "cuda":
        return lambda: None
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    return done.synchronize
