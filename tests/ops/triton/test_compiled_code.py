"""The chunk kernels as compiled for Hopper, run instruction by instruction on a model of a thread block.

Unlike the interpreter, which runs the source, this runs what Triton makes of it: layouts, shared memory, pipelined
copies, barriers, and bfloat16. It also finds what no result shows: accesses whose outcome depends on timing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from delta_rule_cases import DeltaRuleCase
from helpers import assert_within_reference, results_and_gradients
from ptx.thread_block import Program, ThreadBlock
from torch import Tensor

triton = pytest.importorskip("triton")

from ops.triton.launches import launched_by  # noqa: E402
from ops.triton.machine_code import to_ptx  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from deltazoo.ops import delta_rule  # noqa: E402
from deltazoo.ops.call import RuleCall  # noqa: E402
from deltazoo.ops.triton.backward import backward  # noqa: E402
from deltazoo.ops.triton.forward import forward  # noqa: E402
from deltazoo.ops.triton.launch import Constants  # noqa: E402
from deltazoo.ops.triton.problem import Problem  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="with TRITON_INTERPRET=1 Triton cannot compile"
)

OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64"}


class Modelled:
    """Stands in for a kernel: a launch compiles it for Hopper and runs every block on the model."""

    def __init__(self, kernel: JITFunction, hazards: dict[str, str]) -> None:
        self.kernel, self.hazards = kernel, hazards

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*positional: Any, **named: Any) -> None:
            arguments = dict(zip(self.kernel.arg_names, positional, strict=False)) | named
            signature, constants, attributes, given = {}, {}, {}, []
            for position, parameter in enumerate(self.kernel.params):
                value = arguments[parameter.name]
                signature[parameter.name] = "constexpr"
                if isinstance(value, Tensor):
                    signature[parameter.name] = "*" + TYPES[value.dtype]
                    attributes[(position,)] = [["tt.divisibility", 16]]
                elif parameter.is_constexpr or value is None:
                    constants[(position,)] = value
                    continue
                else:
                    signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                given.append(value)
            source = ASTSource(self.kernel, signature, constants, attributes)
            options = {name: arguments[name] for name in OPTIONS if name in arguments}
            with to_ptx():
                compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            self.run(Program(compiled.asm["ptx"]), given, grid)

        return launch

    def run(self, program: Program, given: list[Any], grid: tuple[int, ...]) -> None:
        """Copies the tensors into one memory, runs the grid, copies them back."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in given if isinstance(x, Tensor)}
        starts, end = {}, 256
        for pointer, storage in storages.items():
            starts[pointer], end = end, end + -(-storage.nbytes() // 256) * 256 + 256
        memory = np.zeros(end, np.uint8)
        raw = {p: torch.empty(0, dtype=torch.uint8).set_(s) for p, s in storages.items()}
        for pointer, content in raw.items():
            memory[starts[pointer] : starts[pointer] + len(content)] = content.numpy()
        arguments = []
        for x in given:
            if isinstance(x, Tensor):
                x = starts[x.untyped_storage().data_ptr()] + x.storage_offset() * x.element_size()
            arguments.append(x)
        arguments += [0] * (len(program.parameters) - len(arguments))  # Triton's own scratch memory, unused
        self.execute(program, arguments, memory, grid)
        for pointer, content in raw.items():
            content.copy_(torch.from_numpy(memory[starts[pointer] : starts[pointer] + len(content)]))

    def execute(self, program: Program, arguments: list[Any], memory: np.ndarray, grid: tuple[int, ...]) -> None:
        for position in product(*map(range, (*grid, 1, 1)[:3])):
            self.hazards |= ThreadBlock(program, arguments, memory, position).run()


def judge(case: DeltaRuleCase, strict: bool | None) -> None:
    """Results and gradients in bfloat16 within a few roundings of float64, and nothing that depends on timing."""
    hazards: dict[str, str] = {}

    def on_the_model(kernel: Any, constants: Constants, *tensors: Any) -> None:
        Modelled(kernel, hazards)[constants.grid](*tensors, **constants.named)

    x = case.make(dtype=torch.bfloat16)
    update = (x.erase_key, x.erase_reads == "undecayed", x.num_micro_steps)
    inputs = (x.q, x.k, x.v, x.beta, x.log_decay, case.K**-0.5, x.initial_state, x.cu_seqlens, strict)
    call = RuleCall(*inputs, *update)
    with launched_by(on_the_model):
        output, final_state, kept = forward(Problem(call))
        gradients = backward(call, kept, x.d_output, x.d_final_state)
    names = [f"d_{name}" for name in ("q", "k", "v", "beta", "log_decay", "initial_state", "erase_key")]
    actual = {"output": output, "final_state": final_state}
    actual |= {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
    exact = results_and_gradients(delta_rule, x.double(), backend="chunkwise")
    plain = results_and_gradients(delta_rule, x, backend="chunkwise")
    assert_within_reference(actual, exact, plain, x, rounding=torch.bfloat16, floor=4.0)
    assert not hazards, "\n".join(f"{what} ({where})" for what, where in hazards.items())


TOGETHER = dict(erase="gated", num_micro_steps=2, T=35)
NARROW = DeltaRuleCase("channel_narrow", B=1, T=70, H=1, K=32, V=24, decay="channel", log_decay="reset", beta=0.7)
CASES = [
    NARROW,
    replace(NARROW, name="channel_moderate", log_decay=-0.05),
    # One product serves for blocks of 32, 16 and 8 tokens, and for none of two (`level_in_range`).
    *(replace(NARROW, name=f"channel{g}", log_decay=g) for g in (-4.0, -8.0, -16.0, -60.0)),
    replace(NARROW, name="channel_uneven", K=128, log_decay="uneven"),
    replace(NARROW, name="scalar", K=64, V=72, decay="scalar", initial_state=True),
    replace(NARROW, name="channel_moderate_update", K=64, log_decay=-0.05, **TOGETHER),  # two tiles of key channels
]
MANY = (
    [
        replace(NARROW, name=f"{decay}-{K}x{V}", K=K, V=V, decay=decay, groups=2, initial_state=True)
        for decay, (K, V) in product(("none", "scalar", "channel"), ((64, 64), (96, 33), (128, 128)))
    ]
    + [
        replace(NARROW, name=f"moderate-{K}x{V}", K=K, V=V, groups=2, log_decay=-0.3, initial_state=True)
        for K, V in ((64, 64), (96, 136), (128, 128))
    ]
    + [
        replace(NARROW, name=f"update-{decay}-{g}-{K}x{V}", K=K, V=V, decay=decay, log_decay=g, groups=2, **TOGETHER)
        for decay, g in (
            ("none", 0.0),
            ("channel", "reset"),
            ("channel", -0.3),
            ("channel", -8.0),
            ("channel", "uneven"),
        )
        for K, V in ((96, 33), (128, 128))
    ]
    + [
        replace(
            NARROW, name=f"undecayed-{K}x{V}", K=K, V=V, decay="scalar", groups=2, erase_reads="undecayed", **TOGETHER
        )
        for K, V in ((96, 33), (128, 128))
    ]
)


def run(*instructions: str) -> ThreadBlock:
    """A block of one warp after these instructions."""
    body = "".join(f"{instruction};\n" for instruction in (*instructions, "ret"))
    block = ThreadBlock(Program(f".reqntid 32\n)\n{{\n{body}}}"), [], np.zeros(256, np.uint8), (0, 0, 0))
    block.run()
    return block


def test_model_of_new_instructions() -> None:
    store = ("mov.u32 %r1, %tid.x", "shl.b32 %r2, %r1, 2", "st.shared::cta.b32 [%r2+4], %r1")
    block = run(*store, "bar.sync 0", "ld.shared.b32 %r3, [%r2+4]")
    assert not block.memory.any()
    np.testing.assert_array_equal(block.registers["%r3"], np.arange(32))
    block = run("mov.b32 %r1, 0xBF804000", "neg.bf16x2 %r2, %r1", "abs.bf16x2 %r3, %r1", "neg.bf16 %rs1, 0x8000")
    results = [int(block.registers[name][0]) for name in ("%r2", "%r3", "%rs1")]
    assert results == [0x3F80C000, 0x3F804000, 0]
    block = run(
        "mov.b32 %r1, 0x3C00C000", "neg.f16x2 %r2, %r1", "setp.ne.bf16 %p1, 0x8000, 0", "setp.lt.f16 %p2, 0xC000, 0"
    )
    assert [int(block.registers[name][0]) for name in ("%r2", "%p1", "%p2")] == [0xBC004000, False, True]


@pytest.mark.parametrize(
    "instruction",
    [
        "st.shared::cluster.b32 [%r1], %r1",
        "ld.volatile.global.b32 %r1, [%rd1]",
        "add.s16x2 %r2, %r1, %r1",
        "mul.hi.s64 %rd2, %rd1, 3",
        "setp.lt.and.s32 %p1, %r1, %r2, %p2",
        "fence.acq_rel.gpu",
        "shfl.sync.bfly.b32 %r2, %r1, 1, 7199, -1",  # among eight lanes
    ],
)
def test_model_refuses_instructions_that_it_does_not_know(instruction: str) -> None:
    with pytest.raises(NotImplementedError):
        run("mov.u32 %r1, %tid.x", instruction)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_kernels_are_right_whatever_the_timing(case: DeltaRuleCase) -> None:
    judge(case, None)


@pytest.mark.sweep
@pytest.mark.parametrize("strict", [None, True], ids=["by_gain", "strict"])
@pytest.mark.parametrize("case", MANY, ids=str)
def test_many_compiled_kernels(case: DeltaRuleCase, strict: bool | None) -> None:
    judge(case, strict)
