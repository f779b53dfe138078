"""The step kernel compiled for several cards without a GPU: registers, spills, and the order of its loads."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

triton = pytest.importorskip("triton")

from ops.triton.machine_code import disassembled, resources  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, CompiledKernel  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from deltazoo.ops.triton import step  # noqa: E402

HOPPER, ADA, CONSUMER_BLACKWELL = 90, 89, 120


@dataclass(frozen=True)
class Build:
    """One specialisation of the kernel, with the tile the launcher would choose."""

    arch: int = HOPPER
    K: int = 128
    V: int = 128
    dtype: str = "bf16"
    decay: str = "scalar"
    beta: bool = True
    erase_key: bool = False
    undecayed: bool = False
    micro_steps: int = 1

    def __str__(self) -> str:
        return (
            f"sm{self.arch}-{self.K}x{self.V}-{self.dtype}-{self.decay}{'' if self.beta else '-no_beta'}"
            f"{'-erase_key' if self.erase_key else ''}"
            f"{'-undecayed' if self.undecayed else ''}{'' if self.micro_steps == 1 else f'-{self.micro_steps}_steps'}"
        )

    @property
    def tile(self) -> step.StepTile:
        return step.choose_tile(self.K, self.V)


def build(case: Build) -> CompiledKernel:
    """Compiles as the launcher would for aligned, contiguous tensors on a card of that architecture."""
    kernel = JITFunction(step.step_kernel.fn)  # a compilable one even where TRITON_INTERPRET is set
    pointers = {
        **dict.fromkeys(("q", "k", "v", "output"), f"*{case.dtype}"),
        **dict.fromkeys(("state", "new_state"), "*fp32"),
        "beta": "*fp32" if case.beta else None,
        "log_decay": None if case.decay == "none" else "*fp32",
        "erase_key": f"*{case.dtype}" if case.erase_key else None,
    }
    constants = {
        "K": case.K,
        "V": case.V,
        "BK": triton.next_power_of_2(case.K),
        "BV": case.tile.columns,
        "DECAY_PER_CHANNEL": case.decay == "channel",
        "MICRO_STEPS": case.micro_steps,
        "UNDECAYED": case.undecayed,
        **{name: None for name, type in pointers.items() if type is None},
    }
    types = {**pointers, "scale": "fp32"}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ("state", "new_state")}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": case.tile.warps, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", case.arch, 32), options=options)


BUILDS = [
    *(Build(arch, K, K) for arch in (HOPPER, ADA, CONSUMER_BLACKWELL) for K in (64, 128, 256)),
    *(Build(decay=decay) for decay in ("none", "channel")),
    *(Build(K=K, V=V, decay="channel", dtype="fp32") for K, V in [(256, 512), (96, 192), (20, 33), (16, 16), (1, 1)]),
    Build(decay="none", beta=False, dtype="fp16"),
]
UPDATES = [
    Build(erase_key=True),
    Build(decay="channel", erase_key=True, undecayed=True),
    Build(micro_steps=2),
    Build(K=256, V=256, decay="channel", erase_key=True, undecayed=True, micro_steps=2),
    Build(erase_key=True, micro_steps=4),
]


@pytest.mark.parametrize("case", [*BUILDS, *UPDATES], ids=str)
def test_no_register_spills(case: Build) -> None:
    compiled = build(case)
    used = resources(compiled.asm["cubin"])
    assert used["STACK"] == used["LOCAL"] == 0, used
    # 65,536 registers per SM and 8 KiB of state per warp: with 128 registers sixteen warps keep 128 KiB in flight.
    assert used["REG"] <= (128 if case.micro_steps <= 2 else 168), used
    assert compiled.metadata.shared <= 4096


@pytest.mark.parametrize("K", [64, 128, 256])
def test_state_moves_in_16_byte_accesses_and_without_a_loop(K: int) -> None:
    case = Build(K=K, V=K)
    compiled = build(case)
    assert "scf.for" not in compiled.asm["ttgir"]
    code = disassembled(compiled.asm["cubin"])
    per_thread = K * case.tile.columns // (32 * case.tile.warps)
    assert len(re.findall(r"\bSTG\.E\.128\b", code)) == per_thread // 4
    assert len(re.findall(r"\bLDG\.E\.128\b", code)) == per_thread // 4


def test_state_loads_are_issued_before_anything_waits_for_memory() -> None:
    code = disassembled(build(Build()).asm["cubin"])
    instructions = re.findall(r"\b(LDG\.E\.128|BAR\.SYNC|SHFL|STS|LDS)\b", code)
    num_loads = instructions.count("LDG.E.128")
    assert instructions[:num_loads] == ["LDG.E.128"] * num_loads


def test_offsets_of_the_state_have_64_bits() -> None:
    """B * HV * K * V passes 2**31 at 8,192 sequences of 16 heads of 128 x 128."""
    ttir = build(Build()).asm["ttir"]
    assert re.search(r"tt\.addptr %\w+, %\w+ : tensor<128x\d+x!tt\.ptr<f32>[^\n]*, tensor<128x\d+xi64>", ttir), ttir
