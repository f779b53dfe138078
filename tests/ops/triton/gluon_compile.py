"""Compile Gluon kernels for sm_90a without a GPU: registers, spills, shared memory and what ptxas warns of."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
import triton
from ops.triton.machine_code import faults, keep, told
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from deltazoo.ops.triton.launch import TileView

SHARED_MEMORY = 232_448
"""Bytes per thread block on Hopper."""

ASSEMBLY = () if triton.__version__.startswith("3.6.") else ("--regAllocOptLevel=2",)
"""Options with which Triton calls ptxas, as far as they change the code."""

OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs."""

    registers: int
    """Per thread at the launch, before partitions move some among each other."""
    spilled: int
    """Bytes per thread."""
    shared: int
    """Bytes per thread block."""
    warnings: tuple[str, ...]
    """Of ptxas, such as C7512 and C7514: matrix products that wait for each other. And of `machine_code`."""
    ptx: str
    partition_registers: tuple[int, ...]
    """What partitions of warps set their registers to."""

    def __str__(self) -> str:
        parts = f"registers {self.registers} {list(self.partition_registers)}, spilled {self.spilled}"
        return f"{parts}, shared {self.shared}" + "".join(f"\n    {line}" for line in self.warnings)


def compile_kernel(kernel: Any, arguments: dict[str, Any]) -> Compiled:
    """What a launch with these arguments by name needs: tensors (meta will do), `TileView`s, numbers, options."""
    said = StringIO()
    with redirect_stdout(said), triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = build(kernel, arguments)
    ptx = compiled.asm["ptx"]
    if text := said.getvalue():
        keep(text, *_assembled(ptx))
    return _resources(compiled, ptx, told(*_assembled(ptx)))


def build(kernel: Any, arguments: dict[str, Any]) -> Any:
    """The kernel compiled as a launch would."""
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        signature[parameter.name] = "constexpr"
        if isinstance(value, TileView):
            descriptor = value.descriptor()
            signature[parameter.name] = (
                f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{descriptor.layout!r}>"
            )
        elif isinstance(value, Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None:
            constants[(position,)] = value
        else:
            assert parameter.do_not_specialize or isinstance(value, float), f"{parameter.name} is specialised"
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = GluonASTSource(kernel, signature, constants, attributes)
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _assembled(ptx: str) -> tuple[Any, ...]:
    """What `told` is asked for what ptxas says of the kernel."""
    return get_ptxas(90).path, ptx.encode(), *ASSEMBLY, "-v", "--gpu-name=sm_90a", "-o", "kernel.cubin"


def _resources(compiled: Any, ptx: str, text: str) -> Compiled:
    spilled = sum(int(x) for x in re.findall(r"(\d+) bytes spill", text))
    found = re.search(r"Used (\d+) registers", text)
    assert found, text
    warnings = [line.strip() for line in text.splitlines() if re.search(r"\(C\d+\)", line)]
    warnings += faults(compiled.asm["cubin"])
    partitions = tuple(int(x) for x in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx))
    return Compiled(int(found[1]), spilled, compiled.metadata.shared, tuple(warnings), ptx, partitions)
