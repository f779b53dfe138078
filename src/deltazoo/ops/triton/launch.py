"""Repeated launches of kernels without Triton's Python code, which takes the host longer than the rest of a call.

At every launch Triton determines which compiled kernel fits the arguments. That depends on their dtypes, on which of
them are None or aligned, and on constants. A launch that agrees in all of this with an earlier one starts the kernel
that was compiled then, by the function in C beneath Triton's launcher.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getclosurevars, signature
from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

DIRECT = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))
"""Whether this version passes arguments to kernels in an order used here; with others Triton launches."""

ALIGNMENT = 16
"""Alignment in bytes; Triton compiles a separate kernel for pointers that are no multiple of it."""

MOST_ENCODED = 1024
"""Most addresses whose encoded form a launch keeps, for each of its tiles."""


class Constants:
    """Grid, constants and options of a launch, but not its tensors. It keeps the compiled kernels, so keep it.

    Products are fused with the sums that they enter (`enable_fp_fusion`) whatever Triton's default is: the kernels are
    tuned and tested so.

    Args:
        grid: number of programs along each axis.
        named: all arguments of the kernel that are not tensors, also those with defaults, and Triton's options.
    """

    __slots__ = ("compiled", "grid", "named")

    def __init__(self, *grid: int, **named: Any) -> None:
        self.grid, self.named = grid, named | {"enable_fp_fusion": True}
        self.compiled: dict[tuple[Any, ...], _Start] = {}


@dataclass(frozen=True, eq=False, slots=True)
class Tiling:
    """The cut of a tensor into tiles; two are equal only if they are one object, which is fast to look up."""

    shape: tuple[int, ...]
    """Dimensions from which tiles are cut, in elements."""
    strides: tuple[int, ...]
    """Strides of these dimensions, in elements; the last one is contiguous."""
    block_shape: tuple[int, ...]
    """Size of a tile in each dimension."""


class TileView:
    """A tensor as tiles for a Gluon kernel, which the copy engine (TMA) moves, swizzled for matrix products.

    Triton's `TensorDescriptor` checks its arguments for longer than a launch takes, so it is made at the first launch
    only. Triton's function that encodes tiles reads the same attributes of both.

    Args:
        base: the tensor, of 16 or 32 bits, aligned to 16 bytes.
        tiling: the cut of this tensor.
    """

    __slots__ = ("base", "data_ptr", "dtype", "tiling")
    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, base: Tensor, tiling: Tiling) -> None:
        self.base, self.tiling = base, tiling
        self.data_ptr, self.dtype = base.data_ptr, (base.dtype, tiling)

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions from which tiles are cut."""
        return self.tiling.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of these dimensions."""
        return self.tiling.strides

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Size of a tile."""
        return self.tiling.block_shape

    def descriptor(self) -> Any:
        """Triton's own object for the tiles."""
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        bits = 8 * self.base.element_size()
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=len(self.shape))
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block_shape), layout)


def launch(kernel: Any, constants: Constants, *tensors: Tensor | TileView | None) -> None:
    """Launch `kernel[grid](*tensors, **named)` on the current device and stream; tensors are the first arguments.

    The caller makes sure that the tensors are on this device; Triton checks it at the first launch only.
    """
    if not DIRECT or not isinstance(kernel, JITFunction) or _watched(kernel):
        _through_triton(kernel, constants, tensors)
        return
    active = driver.active
    device = active.get_current_device()
    pointers: list[Any] = [None if x is None else x.data_ptr() for x in tensors]
    bits = 0
    for pointer in pointers:
        if pointer is not None:
            bits |= pointer
    if bits % ALIGNMENT:
        _through_triton(kernel, constants, tensors)
        return
    kind = (kernel.fn, device, *[None if x is None else x.dtype for x in tensors])
    start = constants.compiled.get(kind)
    if start is not None:
        start(active.get_current_stream(device), pointers, tensors)
        return
    compiled = _through_triton(kernel, constants, tensors)
    if isinstance(compiled, CompiledKernel):
        start = _start_of(compiled, constants, tensors, kernel.arg_names[len(tensors) :])
        if start is not None:
            constants.compiled[kind] = start


_Start = Callable[[int, list[Any], tuple[Tensor | TileView | None, ...]], None]
"""A function that starts a compiled kernel on a stream, from the addresses of the tensors and the tensors."""


def _through_triton(kernel: Any, constants: Constants, tensors: tuple[Tensor | TileView | None, ...]) -> Any:
    arguments = [x.descriptor() if type(x) is TileView else x for x in tensors]
    return kernel[constants.grid](*arguments, **constants.named)


def _start_of(
    compiled: CompiledKernel, constants: Constants, tensors: tuple[Any, ...], named: list[str]
) -> _Start | None:
    """A function that starts a kernel that Triton has compiled for these arguments; `named` follow the tensors.

    None if the launcher does more than to encode tiles and call a function in C.
    """
    from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg

    run, forms = compiled.run, compiled.metadata.tensordesc_meta or []
    tiles = [i for i, tensor in enumerate(tensors) if type(tensor) is TileView]
    if not isinstance(run, CudaLauncher) or run.global_scratch_size or run.profile_scratch_size:
        return None
    if len(forms) != len(tiles):  # other descriptors than those of the copy engine
        return None
    in_c = getclosurevars(run.launch).nonlocals["launcher"] if tiles else run.launch  # beneath what encodes tiles
    x, y, z = (*constants.grid, 1, 1)[:3]
    others = [constants.named[name] for name in named]
    flags, hooks, memory = (run.launch_cooperative_grid, run.launch_pdl), (None, None), (None, None)
    options: tuple[Any, ...] = *flags, *memory, compiled.packed_metadata, None, *hooks
    serves_all = hasattr(run, "kernel_signature")  # from Triton 3.7 on; 3.6 compiles a function for each signature
    if serves_all:
        options = *flags, compiled.packed_metadata, None, *hooks, *memory, run.arg_annotations, run.kernel_signature
    unused = (None,) * (len(signature(make_tensordesc_arg).parameters) - 2)  # one argument since Triton 3.8
    known: list[dict[int, list[Any]]] = [{} for _ in tiles]
    places = [*zip(tiles, forms, known, strict=True)][::-1]  # the last one first, since each takes several places

    def start(stream: int, arguments: list[Any], tensors: tuple[Any, ...]) -> None:
        for i, form, encoded in places:
            address = arguments[i]
            tile = encoded.get(address)
            if tile is None:
                if len(encoded) >= MOST_ENCODED:
                    encoded.clear()
                tile = encoded[address] = make_tensordesc_arg(tensors[i], form, *unused)
            arguments[i : i + 1] = tile
        arguments += others
        # The kernel stays loaded as long as `compiled` lives.
        in_c(x, y, z, stream, compiled.function, *options, *((arguments,) if serves_all else arguments))

    return start


def _watched(kernel: JITFunction) -> bool:
    """Whether launch hooks are set, or an option that changes how kernels are compiled."""
    runtime = knobs.runtime
    return bool(
        launches_are_watched()
        or kernel.pre_run_hooks
        or runtime.debug
        or runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
    )


def launches_are_watched() -> bool:
    """Whether hooks for the launches of all kernels are set, as profilers do."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))  # a chain, a function, or None
