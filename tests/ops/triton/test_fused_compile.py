"""The fused kernels compiled for a Hopper card without one: registers, and that nothing spills.

The launches are recorded by running the operators on meta tensors, so what is compiled here is what a call launches.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from deltazoo.ops.triton import gated_norm, short_conv  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="with TRITON_INTERPRET=1 Triton cannot compile"
)

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def convolve(head_dim: int, packed: bool) -> None:
    x, weight, past = empty(1, 512, 1024), empty(1024, 4, dtype=torch.float32), empty(3, 1024, 3)
    where = (empty(512, dtype=torch.int64), empty(4, dtype=torch.int32)) if packed else (None, None)
    past = past if packed else None
    short_conv._forward(x, weight, past, *where, head_dim, 1e-6)
    short_conv._backward(x, weight, past, *where, head_dim, 1e-6, x)


def normalize(head_dim: int, silu: bool) -> None:
    x, weight = empty(4, 100, 8, head_dim), empty(head_dim, dtype=torch.float32)
    gated_norm._forward(x, x, weight, 1e-5, silu)
    gated_norm._backward(x, x, weight, 1e-5, silu, x)


CALLS: dict[str, Callable[[], None]] = {
    "conv": lambda: convolve(0, False),
    "conv_heads_64": lambda: convolve(64, False),
    "conv_heads_128": lambda: convolve(128, False),
    "conv_heads_256": lambda: convolve(256, False),
    "conv_packed_128": lambda: convolve(128, True),
    "norm_silu_128": lambda: normalize(128, True),
    "norm_sigmoid_256": lambda: normalize(256, False),
}


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers per thread, and bytes of local memory, where spilled registers go."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    text = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|LOCAL|STACK):(\d+)", text)}


@pytest.mark.parametrize("name", CALLS)
def test_registers_and_spills(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel: JITFunction, grid: object) -> Callable[..., None]:
        return lambda *args, **options: launched.append((kernel, args, options))

    monkeypatch.setattr(JITFunction, "__getitem__", record)
    CALLS[name]()
    monkeypatch.undo()
    assert len(launched) == 2
    for kernel, args, options in launched:
        warps = options.pop("num_warps")
        values = dict(zip(kernel.arg_names, args, strict=False)) | options
        constants = {n: x for n, x in values.items() if n in options or x is None}
        scalars = {n: "fp32" if isinstance(x, float) else "i32" for n, x in values.items()}
        signature = {
            n: "constexpr" if n in constants else f"*{TYPES[x.dtype]}" if isinstance(x, Tensor) else scalars[n]
            for n, x in values.items()
        }
        aligned = {
            (kernel.arg_names.index(n),): [["tt.divisibility", 16]]
            for n, x in values.items()
            if isinstance(x, Tensor) or n == "C"
        }
        source = ASTSource(kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps})
        found = resources(compiled.asm["cubin"], tmp_path)
        assert found["LOCAL"] == found["STACK"] == 0, (kernel.fn.__name__, found)
        assert found["REG"] <= 168, (kernel.fn.__name__, found)  # three blocks of 4 warps per scheduler or more
