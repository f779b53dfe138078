"""Repeated launches of kernels without Triton's Python code, which takes the host longer than the rest of a call.

At every launch Triton determines which compiled kernel fits the arguments. That depends on their dtypes, on which of
them are None or aligned, and on constants. A launch that agrees in all of this with an earlier one uses the kernel that
was compiled then.
"""

from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

__all__ = ["Constants", "TileView", "launch"]

DIRECT = triton.__version__.startswith(("3.6.", "3.7."))
"""Whether this version is known to pass arguments to kernels in the order used here; with others, Triton launches."""

ALIGNMENT = 16
"""Bytes; Triton compiles a separate kernel for pointers that are no multiple of it."""


class Constants:
    """Grid, constants and options of a launch: all of it but the tensors. Keeps the compiled kernels, so keep it too.

    Args:
        grid: number of programs along each axis.
        named: all arguments of the kernel that are not tensors, also those with defaults, and Triton's options.
    """

    __slots__ = ("compiled", "grid", "named")

    def __init__(self, *grid: int, **named: Any) -> None:
        self.grid, self.named = grid, named
        self.compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}


class TileView:
    """A tensor as a Gluon kernel takes it: as tiles that the copy engine (TMA) moves. Swizzled for matrix products.

    Triton's `TensorDescriptor` checks its arguments for longer than a launch takes, so it is made at the first launch
    only. Triton's launcher reads the same attributes of both.

    Args:
        base: the tensor, of 16 or 32 bits, aligned to 16 bytes.
        shape, strides: the dimensions that tiles are cut from, in elements; the last one contiguous.
        block_shape: size of a tile in each of them.
    """

    __slots__ = ("base", "block_shape", "data_ptr", "dtype", "shape", "strides")
    padding, round_f32_to_tf32 = "zero", False

    def __init__(
        self, base: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block_shape: tuple[int, ...]
    ) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.data_ptr, self.dtype = base.data_ptr, (base.dtype, block_shape)

    def descriptor(self) -> Any:
        """Triton's own object for it."""
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        bits = 8 * self.base.element_size()
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=len(self.shape))
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block_shape), layout)


def _triton_arguments(tensors: tuple[Tensor | TileView | None, ...]) -> list[Any]:
    return [x.descriptor() if type(x) is TileView else x for x in tensors]


def launch(kernel: Any, constants: Constants, *tensors: Tensor | TileView | None) -> None:
    """`kernel[grid](*tensors, **named)` on the current device and stream; the kernel takes tensors first.

    The caller makes sure that the tensors are on this device; Triton checks it at the first launch only.
    """
    if not DIRECT or not isinstance(kernel, JITFunction) or _watched(kernel):
        kernel[constants.grid](*_triton_arguments(tensors), **constants.named)
        return
    active = driver.active
    device = active.get_current_device()
    pointers: list[Any] = [None if x is None else x.data_ptr() for x in tensors]
    bits = 0
    for pointer in pointers:
        if pointer is not None:
            bits |= pointer
    key = (kernel.fn, device, *[None if x is None else x.dtype for x in tensors])
    if bits % ALIGNMENT:
        kernel[constants.grid](*_triton_arguments(tensors), **constants.named)
        return
    known = constants.compiled.get(key)
    if known is None:
        compiled = kernel[constants.grid](*_triton_arguments(tensors), **constants.named)
        if isinstance(compiled, CompiledKernel):
            others = tuple([constants.named[name] for name in kernel.arg_names[len(tensors) :]])
            tiles = [i for i, x in enumerate(tensors) if type(x) is TileView]
            constants.compiled[key] = compiled, compiled.run, (*constants.grid, 1, 1)[:3], others, tiles
        return
    compiled, run, (x, y, z), others, tiles = known
    for i in tiles:
        pointers[i] = tensors[i]
    stream = active.get_current_stream(device)
    run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *pointers, *others)


def _watched(kernel: JITFunction) -> bool:
    """Whether launch hooks are set, or an option that changes how kernels are compiled."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # chains of functions, a function, or None
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or kernel.pre_run_hooks
        or runtime.debug
        or runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
    )
