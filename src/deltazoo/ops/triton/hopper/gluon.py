"""Gluon, as the installed Triton has it, and whether its kernels can run on a device.

Gluon is Triton's language for kernels that choose layouts, copies and barriers themselves. It is experimental: names
may move from version to version. On a version that is not known, or that lacks a name, the plain Triton kernels serve
every call, and one warning says so.
"""

import warnings
from functools import lru_cache

import torch
import triton

MISSING: str | None = None
"""What the installed Triton lacks for the Gluon kernels; None if it has everything."""
try:
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        mma_v2,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in 3.7
    if not triton.__version__.startswith(("3.6.", "3.7.")):
        MISSING = f"the Gluon kernels are known to work with Triton 3.6 and 3.7 only, this is {triton.__version__}"
except (ImportError, AttributeError) as error:
    MISSING = f"Triton {triton.__version__} lacks a part of Gluon: {error}"

__all__ = [
    "MISSING",
    "async_copy",
    "available",
    "barrier",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "mma_v2",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


@lru_cache
def available(device: torch.device) -> bool:
    """Whether Gluon kernels run on this device with this Triton; warns once if only Triton stands in the way."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():  # tensors without data need none
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if triton.knobs.runtime.interpret:
        return False
    if MISSING is not None:
        _warn_once(MISSING)
        return False
    return True


@lru_cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"{reason}. Plain Triton kernels, which are slower, take their place.", stacklevel=2)
