"""Gluon of the installed Triton, the test whether its kernels run on a device, and tensors as tiles to copy.

Gluon is Triton's language for kernels that choose layouts, copies and barriers themselves. It is experimental: names
may move from version to version. On a version that is not known, or that lacks a name, the plain Triton kernels serve
every call, and one warning says so.
"""

import warnings
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from deltazoo.ops.triton.launch import TileView, Tiling
from deltazoo.ops.triton.tiles import CHUNK


def _named(where: Any, name: str, before: str) -> Any:
    """The thing of this name, or of the one that it had before."""
    return getattr(where, name) if hasattr(where, name) else getattr(where, before)


MISSING: str | None = None
"""The thing that the installed Triton lacks for the Gluon kernels, in words; None if it has everything."""
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

    barrier = _named(gl, "barrier", "thread_barrier")  # until 3.6
    reinterpret = _named(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")  # until 3.8
    # Until 3.7.
    async_load = _named(async_copy, "async_load", "async_copy_global_to_shared")
    tma_load = _named(tma, "async_load", "async_copy_global_to_shared")
    tma_store = _named(tma, "async_store", "async_copy_shared_to_global")
    if not triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9.")):
        MISSING = f"the Gluon kernels are known to work with Triton 3.6 to 3.9 only, this is {triton.__version__}"
except (ImportError, AttributeError) as error:
    MISSING = f"Triton {triton.__version__} lacks a part of Gluon: {error}"

__all__ = [
    "MISSING",
    "async_copy",
    "async_load",
    "available",
    "barrier",
    "fence_async_shared",
    "gl",
    "jit",
    "matrix_tiles",
    "mbarrier",
    "mma_v2",
    "reinterpret",
    "states_tiles",
    "tma",
    "tma_load",
    "tma_store",
    "token_tiles",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


@lru_cache
def available(device: torch.device) -> bool:
    """Whether Gluon kernels run on this device with this Triton; warns once if only Triton stands in the way."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():  # tensors without data
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


@lru_cache(maxsize=1024)
def _token_tiles(shape: torch.Size, channels: int) -> Tiling:
    B, T, H, D = shape
    return Tiling((B, T, H * D), (T * H * D, H * D, 1), (1, CHUNK, channels))


@lru_cache(maxsize=1024)
def _matrix_tiles(shape: torch.Size, rows: int) -> Tiling:
    D = shape[-1]
    return Tiling((shape.numel() // D, D), (D, 1), (rows, D))


def token_tiles(x: Tensor, channels: int) -> TileView:
    """Tiles of a chunk of tokens by `channels` of one head, from x `[B, T, H, D]`.

    Coordinates are row of the batch, token, `head * D + channel`. Tokens beyond T are read as zero and not written.
    """
    return TileView(x, _token_tiles(x.shape, channels))


def matrix_tiles(x: Tensor, rows: int) -> TileView:
    """Tiles of `rows` full rows of x `[..., D]`; coordinates are the row, over all leading dimensions, and 0."""
    return TileView(x, _matrix_tiles(x.shape, rows))


def states_tiles(states: Tensor) -> TileView:
    """Tiles of half of the value channels of the kept states `[slots, V, K]` or `[2, B, tokens, HV, K]`."""
    if states.ndim == 5:  # value channels stand in place of the tokens
        two, B, T, H, D = states.shape
        return TileView(states, _token_tiles(torch.Size((two * B, T, H, D)), D))
    return matrix_tiles(states, states.shape[1] // 2)
