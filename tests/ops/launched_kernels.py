"""The kernels that a call launches, compiled for a Hopper card without having one, and the registers that they take.

The launches are recorded by running the call on meta tensors, so what is compiled here is what the call launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from ops.triton.machine_code import resources
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from deltazoo.ops.decoding import launch_ahead
from deltazoo.ops.triton import launch

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
KNOWN_TRITON = triton.__version__.startswith(("3.6.", "3.7."))
MORE = {
    "short_conv_forward_kernel": (0, 8),
    "short_conv_backward_kernel": (143, 8),
    "norm_backward_kernel": (71, 0),
    "token_product_kernel": (0, 48),
}
"""Registers and bytes of stack that kernels may take beyond the limits, which are those of Triton 3.6 and 3.7.

With 3.8 a convolution of packed rows takes 8 bytes of stack. Triton 3.9 assembles for Hopper with ptxas 13.4: three
blocks of the convolution's backward pass fit a multiprocessor, not four, and seven of the norm's, not eight.
"""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def compile_launches(
    call: Callable[[], object], count: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CompiledKernel]:
    """The kernels that a call launches, `count` of them, compiled as the launcher would."""
    launched: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel: JITFunction, grid: object) -> Callable[..., None]:
        return lambda *args, **options: launched.append((kernel, args, options))

    with monkeypatch.context() as patch:
        patch.setattr(launch, "DIRECT", False)
        patch.setattr(JITFunction, "__getitem__", record)
        patch.setattr(launch_ahead, "launches_ahead", lambda device: True)
        call()
    assert len(launched) == count
    for kernel, args, options in launched:
        names = ("num_warps", "maxnreg", "enable_fp_fusion")
        compiled_with = {option: options.pop(option) for option in names if option in options}
        options.pop("launch_pdl", None)
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        values = {parameter.name: given.pop(parameter.name) for parameter in kernel.params}
        assert not given
        constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr or values[p.name] is None}
        scalars = {n: "fp32" if isinstance(x, float) else "i32" for n, x in values.items()}
        signature = {
            n: "constexpr" if n in constants else f"*{TYPES[x.dtype]}" if isinstance(x, Tensor) else scalars[n]
            for n, x in values.items()
        }
        aligned = {
            (kernel.arg_names.index(n),): [["tt.divisibility", 16]]
            for n, x in values.items()
            if isinstance(x, Tensor) or is_specialized(kernel, n) and isinstance(x, int) and x % 16 == 0
        }
        source = ASTSource(kernel, signature, constants, aligned)
        yield triton.compile(source, target=HOPPER, options=compiled_with)


def is_specialized(kernel: JITFunction, name: str) -> bool:
    """Whether Triton compiles a version of its own for values of an argument that are multiples of 16."""
    parameter = kernel.params[kernel.arg_names.index(name)]
    return not parameter.is_constexpr and not parameter.do_not_specialize


def check_registers(compiled: CompiledKernel, blocks: int, *, stack: int = 0) -> None:
    """No spills beyond `stack` bytes, no float64, registers for so many blocks of four warps on a multiprocessor."""
    found = resources(compiled.asm["cubin"])
    assert "f64" not in compiled.asm["ttir"], compiled.name  # as a constant that is no normal float32 makes it
    registers, more = (0, 0) if KNOWN_TRITON else MORE.get(compiled.name, (0, 0))
    assert found["LOCAL"] == 0 and found["STACK"] <= stack + more, (compiled.name, found)
    assert found["REG"] <= max(registers, 65536 // (128 * blocks)), (compiled.name, found)
