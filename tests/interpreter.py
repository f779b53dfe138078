"""Triton's interpreter, in which children of the tests run kernels on a CPU: mended, and without work whose results it
drops.
"""

import os
from typing import Any


def quicken_the_interpreter() -> None:
    """Where kernels are interpreted, masks are booleans, and half of the time is spared; results keep their bits.

    The interpreter notes the results of comparisons under the dtype of what is compared, and spreads a scalar one over
    a block as integers, which Triton 3.9 refuses as a mask. Here they stay booleans.

    It remaps the functions of Triton's language at every call of a function by a kernel, where all are remapped
    already; computes each integer result once more, in int64, for an assertion that is off; and for every result makes
    the type of its block anew, with its name and its sizes as constants.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if getattr(interpreter._patch_lang, "__module__", None) == __name__:
        return
    _keep_masks_boolean()
    _remap_once_per_launch()
    _make_types_once()


def _keep_masks_boolean() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    spread = InterpreterBuilder.create_splat

    def create_splat(self: Any, of: Any, scalar: Any) -> Any:
        return spread(self, of, TensorHandle(scalar.data, tl.int1) if scalar.data.dtype == bool else scalar)

    InterpreterBuilder.create_splat = create_splat


def _remap_once_per_launch() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    remap = interpreter._patch_lang

    def remap_what_is_not(function: Any) -> Any:
        languages = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        left = [f for language in languages for f in (language.load, language.tensor.__add__) if tl.core.is_builtin(f)]
        return remap(function) if left or not languages else interpreter._LangPatchScope()

    interpreter._patch_lang = remap_what_is_not


def _make_types_once() -> None:
    import numpy as np
    from triton.language import core, semantic
    from triton.runtime import interpreter

    block_types: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    make_block_type, numpy_type = core.block_type.__init__, interpreter._get_np_dtype
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    numpy_types: dict[str, np.dtype] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(x.value if type(x) is core.constexpr else x for x in shape)
        pointed = (element_ty.address_space, element_ty.const) if element_ty.is_ptr() else ()
        key = (element_ty.name, *pointed, sizes)
        if key not in block_types:
            make_block_type(self, element_ty, shape)
            block_types[key] = {**vars(self), "sizes": sizes}
        vars(self).update(block_types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = type.sizes if type.is_block() else ()
        if sizes not in shapes:
            shape = core.tuple([core.constexpr(size) for size in sizes])
            shapes[sizes] = core.constexpr(int(np.prod(sizes, dtype=int))), shape
        self.numel, self.shape = shapes[sizes]

    def np_dtype(of: Any) -> np.dtype:
        scalar = of.scalar
        if scalar.is_ptr():
            return np.dtype(np.uint64)
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = numpy_type(scalar)
        return numpy_types[scalar.name]

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        fit = lhs.type.is_block() and rhs.type.is_block() and lhs.type.sizes == rhs.type.sizes
        return (lhs, rhs) if fit else broadcast(self, lhs, rhs)

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = np_dtype
    semantic.TritonSemantic.broadcast_impl_value = broadcast_impl_value
    assert not interpreter.interpreter_builder.options.debug  # or the assertion of the sum in int64 would be on
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *arguments: None
