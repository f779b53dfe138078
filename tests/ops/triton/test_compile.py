"""The chunk kernels compiled without a GPU: registers, shared memory and spills of what is launched.

The launches are recorded by running the pipeline on meta tensors, so what is compiled here is what a call would launch
on a card of that kind, its tiles included.
"""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from helpers import Missed, known_miss
from ops.triton.machine_code import faults, more_spilled, resources
from torch import Tensor

triton = pytest.importorskip("triton")

from ops.triton.launches import arguments_of, launched_by, routed  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, CompiledKernel  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from deltazoo.ops.call import RuleCall  # noqa: E402
from deltazoo.ops.triton.backward import backward  # noqa: E402
from deltazoo.ops.triton.forward import forward  # noqa: E402
from deltazoo.ops.triton.launch import Constants  # noqa: E402
from deltazoo.ops.triton.plan import Card  # noqa: E402
from deltazoo.ops.triton.problem import Problem  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="with TRITON_INTERPRET=1 Triton cannot compile"
)

AMPERE, ADA, HOPPER, BLACKWELL = 80, 89, 90, 120
SHARED_MEMORY = {AMPERE: 166_912, ADA: 101_376, HOPPER: 232_448, BLACKWELL: 101_376}  # bytes per thread block
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64"}
DECAYS = ("none", "scalar", "channel")


@dataclass(frozen=True)
class Call:
    """One call of the operator, as far as its compiled kernels depend on it."""

    arch: int = HOPPER
    K: int = 128
    V: int = 128
    decay: str = "scalar"
    precision: str | None = None  # or "fast", "strict", or "linear": no beta
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False
    state: bool = False
    segmented: bool = False
    erase_key: bool = False
    undecayed: bool = False
    num_micro_steps: int = 1
    in_place: bool = False  # where Gluon kernels scan too
    only: tuple[str, ...] = ()  # names of kernels; all of them unless given

    def __str__(self) -> str:
        names = ("packed", "state", "segmented", "erase_key", "undecayed", "in_place")
        flags = [name for name in names if getattr(self, name)]
        flags += [f"{self.num_micro_steps}_steps"] * (self.num_micro_steps > 1)
        dtype = TYPES[self.dtype]
        return "-".join(
            [f"sm{self.arch}", f"{self.K}x{self.V}", self.decay, self.precision or "by_gain", dtype, *flags]
        )

    def run(self) -> None:
        """Forward and backward on meta tensors: every kernel is launched, nothing is computed."""
        B, T, n = 40 if self.in_place else 1, 64 * 64 if self.segmented else 256, self.num_micro_steps
        H, HV = 2, 4
        N = 3 if self.packed else B

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        q = empty(B, T, H, self.K, dtype=self.dtype)
        k, e = (empty(B, T * n, H, self.K, dtype=self.dtype) for _ in range(2))
        v = empty(B, T * n, HV, self.V, dtype=self.dtype)
        beta = None if self.precision == "linear" else empty(B, T * n, HV)
        log_decay = {"none": None, "scalar": empty(B, T, HV), "channel": empty(B, T, HV, self.K)}[self.decay]
        state = empty(N, HV, self.K, self.V) if self.state else None
        cu_seqlens = empty(N + 1, dtype=torch.int32) if self.packed else None
        strict = None if self.precision is None else self.precision == "strict"
        update = (e if self.erase_key else None, self.undecayed, n)
        inputs = (q, k, v, beta, log_decay, 0.1, state, cu_seqlens, strict, *update)
        call = RuleCall(*inputs)
        output, final_state, kept = forward(Problem(call))
        backward(call, kept, output, final_state if self.state else None, in_place=self.in_place)


@dataclass(frozen=True)
class Launch:
    """A kernel and its arguments by name, options such as num_warps among them."""

    kernel: JITFunction
    arguments: dict[str, Any]

    def __str__(self) -> str:
        keep = "(keep)" if self.arguments.get("KEEP") else "(strong)" if self.arguments.get("STRONG") else ""
        strict = "(strict)" if self.arguments.get("STRICT") and self.arguments.get("BY_GAIN") else ""
        return self.kernel.fn.__name__.removesuffix("_kernel") + keep + strict

    def compile(self, arch: int) -> CompiledKernel:
        """As the launcher would for aligned tensors on a card of that architecture."""
        signature, constants, attributes = {}, {}, {}
        for position, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            signature[parameter.name] = "constexpr"
            if isinstance(value, Tensor):
                signature[parameter.name] = "*" + TYPES[value.dtype]
                attributes[(position,)] = [["tt.divisibility", 16]]
            elif parameter.is_constexpr or value is None:
                constants[(position,)] = value
            else:
                assert parameter.do_not_specialize or isinstance(value, float), f"{parameter.name} is specialised"
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        source = ASTSource(self.kernel, signature, constants, attributes)
        options = {name: self.arguments[name] for name in OPTIONS if name in self.arguments}
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def launches_of(call: Call) -> list[Launch]:
    launches: list[Launch] = []

    def record(kernel: Any, constants: Constants, *tensors: Any) -> None:
        assert all(size > 0 for size in constants.grid)
        launches.append(Launch(kernel, arguments_of(kernel, constants, tensors)))

    with launched_by(record), routed(Card(SHARED_MEMORY[call.arch], gluon=call.in_place)):
        call.run()
    return launches


def used_by(compiled: CompiledKernel) -> dict[str, int]:
    """Registers per thread, bytes per thread of local memory, and bytes per thread block of shared memory."""
    used = resources(compiled.asm["cubin"])
    return {"registers": used["REG"], "spilled": used["STACK"] + used["LOCAL"], "shared": compiled.metadata.shared}


def operands_overwritten(compiled: CompiledKernel) -> bool:
    """Whether products of one iteration may still run while copies for the next one overwrite their operands.

    Triton lets them run on into the next iteration (`pendings` > 0), which needs a second buffer per operand. It has
    only one if registers read the loaded tile as well.
    """
    code = compiled.asm["ttgir"]
    run_on = re.search(r"warp_group_dot_wait .*pendings = [1-9]", code)
    return bool(run_on and re.search(r"local_alloc : \(\) -> !ttg\.memdesc<1x\d+x\d+x[bf]", code))


def spill_limit(call: Call, launch: Launch) -> int:
    """Bytes per thread that may be spilled: a little anywhere, more where the products leave ptxas no choice."""
    name = launch.kernel.fn.__name__
    if call.dtype == torch.float32:  # three-term products; ptxas gives up on the scans
        return 16_384 if "scan" in name or call.arch != HOPPER else 4096
    if call.K == 256 and "scan" in name and call.arch != HOPPER:  # ptxas gives up on some, all spilled
        return 16_384
    if launch.arguments.get("STRONG") or launch.arguments.get("PART") == 2:  # the way for strong decay
        return 4096
    if call.arch != HOPPER and name.startswith(
        ("prepare", "chunk_gradients")
    ):  # operands of products are registers there
        return 2048
    return 512


def check(call: Call) -> None:
    """Compile every distinct launch of a call, print what each needs, and fail if any exceeds the limits."""
    failures, spilling, seen = [], {}, set()
    for launch in launches_of(call):
        constants = {p.name: launch.arguments[p.name] for p in launch.kernel.params if p.is_constexpr}
        key = (str(launch), *sorted(constants.items()))
        if key in seen or (call.only and str(launch) not in call.only):
            continue
        seen.add(key)
        compiled = launch.compile(call.arch)
        used = used_by(compiled)
        line = f"{call} {launch}: " + ", ".join(f"{what} {number}" for what, number in used.items())
        print(line)
        spilled = spill_limit(call, launch) + more_spilled(200) * (call.arch == HOPPER)
        limits = {"registers": 255, "spilled": spilled, "shared": SHARED_MEMORY[call.arch]}
        if used["registers"] > limits["registers"] or used["shared"] > limits["shared"]:
            failures.append(f"{line}; allowed: {limits}")
        elif used["spilled"] > limits["spilled"]:
            spilling[f"{line}; allowed: {limits}"] = used["spilled"]
        if call.arch == HOPPER and (wrong := faults(compiled.asm["cubin"])):
            failures.append("\n    ".join([f"{line}; ptxas' faults in the machine code", *wrong]))
        if operands_overwritten(compiled):
            failures.append(f"{line}; copies for the next iteration of a loop overwrite what its products still read")
    assert len(seen) >= (len(call.only) or 5), "a forward and a backward pass launch at least five kernels"
    assert not failures, "\n".join([*failures, *spilling])
    if spilling:
        raise Missed("\n".join(spilling), max(spilling.values()))


LARGEST = ("reverse_scan(keep)",)  # in shared memory
CHANNEL = ("prepare_channel", "chunk_gradients_channel", "chunk_gradients_levels(strong)")
REPRESENTATIVE = [
    Call(HOPPER, only=("prepare", "scan(keep)", "chunk_gradients")),
    Call(HOPPER, decay="none", only=("scan(keep)(strict)",)),
    Call(HOPPER, decay="channel", only=CHANNEL),
    Call(HOPPER, decay="channel", precision="strict", packed=True, state=True, only=LARGEST),
    Call(HOPPER, decay="channel", erase_key=True, num_micro_steps=3, only=CHANNEL),
    Call(AMPERE, decay="channel", only=("reverse_scan(keep)(strict)",)),
    Call(ADA, decay="scalar", precision="fast", only=(*LARGEST, "chunk_gradients")),
    Call(BLACKWELL, 64, 64, decay="channel", precision="linear", only=LARGEST),
    Call(HOPPER, erase_key=True, undecayed=True, only=("prepare", "chunk_gradients", *LARGEST)),
    Call(HOPPER, decay="none", erase_key=True, num_micro_steps=2, only=("scan", "chunk_gradients")),
]
SWEEP = [
    Call(HOPPER, decay="channel", packed=True, state=True, only=("scan(strict)", "reverse_scan(keep)(strict)")),
    Call(HOPPER, decay="channel", in_place=True, only=("reverse_scan(keep)(strict)",)),
    *(
        Call(HOPPER, decay="channel", erase_key=erase, num_micro_steps=steps, only=CHANNEL)
        for erase, steps in ((True, 1), (False, 2))
    ),
    *(
        Call(arch, K, V, decay, precision, segmented=True)
        for arch, K, V, decay, precision in product(
            SHARED_MEMORY, (64, 128, 256), (64, 128, 256), DECAYS, ("linear", None)
        )
        if K == V or V == 128
    ),
    *(Call(arch, 128, 128, d, p) for arch, d, p in product(SHARED_MEMORY, DECAYS, ("fast", "strict"))),
    *(Call(arch, K, K, d, None, torch.float32) for arch, K, d in product(SHARED_MEMORY, (64, 128, 256), DECAYS)),
    *(Call(HOPPER, K, K, decay, precision) for K, decay, precision in product((16, 32), DECAYS, ("linear", None))),
    *(Call(HOPPER, 16, 24, decay, dtype=dtype) for decay, dtype in product(DECAYS, (torch.float16, torch.float32))),
    *(Call(arch, 256, 512, decay) for arch, decay in product(SHARED_MEMORY, DECAYS)),
    *(
        Call(arch, K, K, decay, dtype=dtype, erase_key=True, undecayed=n > 1 and decay != "channel", num_micro_steps=n)
        for arch, K, decay, dtype, n in product(
            SHARED_MEMORY, (64, 128, 256), DECAYS, (torch.bfloat16, torch.float32), (1, 2)
        )
    ),
]


@pytest.mark.parametrize("call", REPRESENTATIVE, ids=str)
def test_kernels_fit_the_card(call: Call) -> None:
    check(call)


PTXAS_GIVES_UP = known_miss(
    "ptxas gives up on the preparation: 22.9 to 28.9 KB spilled where 16.4 are allowed (docs/precision.md)",
    at_most=29_000,
)


JUST_OVER = {
    str(Call(HOPPER, 256, 128, segmented=True)): known_miss("the strict scan spills 592 bytes of 512", at_most=640),
    str(Call(HOPPER, 256, 256, erase_key=True, undecayed=True, num_micro_steps=2)): known_miss(
        "the chunk gradients spill 528 bytes of 512", at_most=576
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("call", SWEEP, ids=str)
def test_every_kernel_fits_every_card(call: Call) -> None:
    gives_up = call.dtype == torch.float32 and call.K == 256 and call.decay != "channel" and call.arch != HOPPER
    known = PTXAS_GIVES_UP if gives_up else JUST_OVER.get(str(call))
    with known or nullcontext():
        check(call)
