"""The Gluon kernels for Hopper: compiled for sm_90a without a GPU, and their results on one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from delta_rule_cases import DeltaRuleCase, DeltaRuleInputs  # noqa: E402
from helpers import assert_within_reference, relative_errors, results_and_gradients  # noqa: E402
from ops.triton.gluon_compile import SHARED_MEMORY, compile_kernel  # noqa: E402
from ops.triton.launches import HOPPER, arguments_of, is_gluon, launched_by, routed  # noqa: E402
from ops.triton.machine_code import more_spilled  # noqa: E402

from deltazoo.ops import delta_rule  # noqa: E402
from deltazoo.ops.call import RuleCall  # noqa: E402
from deltazoo.ops.context.backends import backend_for  # noqa: E402
from deltazoo.ops.triton import gluon  # noqa: E402
from deltazoo.ops.triton.backward import backward  # noqa: E402
from deltazoo.ops.triton.forward import forward  # noqa: E402
from deltazoo.ops.triton.gluon import MISSING  # noqa: E402
from deltazoo.ops.triton.launch import Constants, launch  # noqa: E402
from deltazoo.ops.triton.plan import OBSTACLES, Card, Plan  # noqa: E402
from deltazoo.ops.triton.problem import Problem  # noqa: E402

DECAYS = ("none", "scalar", "channel")
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Gluon has no interpreter"),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]


@dataclass(frozen=True)
class Call:
    """One call of the operator, as far as its compiled kernels depend on it."""

    decay: str = "scalar"
    dtype: torch.dtype = torch.bfloat16
    state: bool = True
    erase_key: bool = False
    undecayed: bool = False
    few: bool = False
    segmented: bool = False
    strict: bool | None = None
    keep: bool = True
    in_place: bool = False
    shared: bool = False  # rows of several ranks

    def launches(self) -> list[tuple[Any, dict[str, Any]]]:
        """Kernels in Gluon and their arguments by name, of forward and backward on meta tensors."""
        launches = []

        def record(kernel: Any, constants: Constants, *tensors: Any) -> None:
            if is_gluon(kernel):
                launches.append((kernel, arguments_of(kernel, constants, tensors)))

        with launched_by(record), routed(HOPPER):
            self.run()
        return launches

    def run(self) -> None:
        B, T, H, HV = (1, 4096, 2, 2) if self.segmented else (1, 256, 2, 4) if self.few else (40, 256, 1, 2)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        q, k, e = (empty(B, T, H, 128, dtype=self.dtype) for _ in range(3))
        v, beta = empty(B, T, HV, 128, dtype=self.dtype), empty(B, T, HV)
        log_decay = dict(none=None, scalar=empty(B, T, HV), channel=empty(B, T, HV, 128))[self.decay]
        state = empty(B, HV, 128, 128) if self.state else None
        update = (e if self.erase_key else None, self.undecayed, 1)
        inputs = (q, k, v, beta, log_decay, 0.1, state, None, self.strict, *update)
        rule_call = RuleCall(*inputs)
        if self.shared:
            backend = backend_for("triton", 2 * B)
            kept = backend.pairs(rule_call)[2]
            output, ends, states = backend.outputs(rule_call, kept, keep=True)
            backend.start_gradients(rule_call, (*kept, *states), output, ends)
            backend.gradients(rule_call, (*kept, *states), output, ends)
            return
        output, final_state, kept = forward(Problem(rule_call), self.keep)
        backward(rule_call, kept, output, final_state if self.state else None, self.in_place)


CALLS = [
    Call(decay="scalar", undecayed=True, state=False),
    Call(decay="scalar", erase_key=True, few=True),
    Call(decay="channel", few=True, state=False),
    Call(decay="channel", keep=False, in_place=True),
    Call(decay="channel", shared=True),
]
MORE_CALLS = [
    Call(decay="none", strict=False, dtype=torch.float16),
    Call(decay="channel", dtype=torch.float16),
    Call(decay="channel", few=True, keep=False),
    Call(decay="channel"),
    Call(decay="scalar", erase_key=True, keep=False),
    Call(decay="none", segmented=True, dtype=torch.float16),
]


@pytest.mark.parametrize("call", CALLS + [pytest.param(x, marks=pytest.mark.sweep) for x in MORE_CALLS], ids=str)
def test_compiles_without_spills_and_with_products_in_flight(call: Call) -> None:
    launches = call.launches()
    assert launches
    for kernel, arguments in launches:
        if kernel.fn.__name__.startswith(("backward", "hopper_chunk_gradients", "hopper_forward")):
            continue  # see test_hopper_backward.py, test_hopper_gradients.py and test_hopper_forward.py
        if call.shared and kernel.fn.__name__ == "hopper_scan_kernel":
            continue  # as in other calls
        compiled = compile_kernel(kernel, arguments)
        print(kernel.__name__, {n: x for n, x in arguments.items() if n.isupper()}, compiled)
        # Of the scans a number or two, with some versions of Triton; second terms take registers too.
        assert compiled.spilled <= (350 if arguments.get("STRICT") else 16) + more_spilled(480)
        assert compiled.shared <= SHARED_MEMORY
        assert not [line for line in compiled.warnings if "C7519" not in line]  # that one costs next to nothing


def sizes(**changes: Any) -> Plan:
    """The plan of a call that the kernels serve, but for the changes."""
    named = dict(
        q=torch.Size([2, 256, 2, 128]), v=torch.Size([2, 256, 4, 128]), dtype=torch.bfloat16, decay="scalar",
        has_beta=True, sequences=None, strict=None, has_erase_key=False, undecayed=False, num_micro_steps=1, scale=0.1,
        card=HOPPER,
    )  # fmt: skip
    return Plan(**named | changes)


def test_says_why_a_call_is_left_to_plain_triton() -> None:
    assert sizes().route.scans == "gluon" and "scans" not in sizes().route.why
    refused = {
        "heads have 64 key and 128 value channels, not 128": dict(q=torch.Size([2, 256, 2, 64])),
        "inputs are float32": dict(dtype=torch.float32),
        "there are no step sizes": dict(has_beta=False),
        "tokens have several micro-steps": dict(num_micro_steps=2, v=torch.Size([2, 512, 4, 128])),
        "rows are packed": dict(q=torch.Size([1, 256, 2, 128]), v=torch.Size([1, 256, 4, 128]), sequences=2),
        "there are no tokens": dict(q=torch.Size([2, 0, 2, 128]), v=torch.Size([2, 0, 4, 128])),
        "there are more chunks than 32-bit coordinates address": dict(
            q=torch.Size([2**12, 2**16, 2, 128]), v=torch.Size([2**12, 2**16, 4, 128])
        ),
    }
    refused["Gluon kernels run on Hopper GPUs, with Triton 3.6 to 3.9"] = dict(card=Card())
    for reason, changes in refused.items():
        route = sizes(**changes).route
        assert route == ("triton", "stages", "stages", "stages", "triton", "chunks", "chunks", route.why)
        assert route.why == dict.fromkeys(("scans", "forward", "recorded", "backward", "gradients"), reason)


def test_the_documentation_lists_every_obstacle() -> None:
    text = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text(encoding="utf-8")
    table = text.partition("### Route")[2].partition("###")[0]
    for _, _, reason in OBSTACLES:
        words = re.split(r"\{.*?\}", reason)
        assert re.search(".+?".join(map(re.escape, words)), table), reason


def test_an_empty_batch_is_left_to_plain_triton() -> None:
    """The copy engine takes no tensor without elements."""
    assert not sizes(q=torch.Size([0, 256, 2, 128]), v=torch.Size([0, 256, 4, 128])).gluon


def test_tensors_without_data_need_no_card() -> None:
    gluon.available.cache_clear()
    assert torch.cuda.is_available() or not gluon.available(torch.device("cuda", 0))


def test_a_triton_without_gluon_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "MISSING", "a name has moved")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for cached in (gluon.available, gluon._warn_once):
        cached.cache_clear()
    with pytest.warns(UserWarning, match="a name has moved. Plain Triton kernels") as told:
        assert not any(gluon.available(torch.device("cuda", i)) for i in range(2))
    assert len(told) == 1
    for cached in (gluon.available, gluon._warn_once):
        cached.cache_clear()


def no_kernels() -> bool:
    return not torch.cuda.is_available() or not gluon.available(torch.device("cuda", 0))


def shaped(name: str, **options: object) -> DeltaRuleCase:
    options = {"B": 2, "T": 256, "H": 2, "K": 128, "V": 128, "beta": 0.9, "initial_state": True} | options
    return DeltaRuleCase(name, **options)  # type: ignore[arg-type]


def assert_right(inputs: DeltaRuleInputs, dtype: torch.dtype) -> None:
    """Results and gradients on the GPU, against the reference in float64 and what plain torch makes of the dtype."""
    names = launched_kernels(inputs)
    assert "hopper_scan_kernel" in names and names & {"hopper_reverse_scan_kernel", "backward_kernel"}
    actual = results_and_gradients(delta_rule, inputs, backend="triton")
    exact = results_and_gradients(delta_rule, inputs.double(), backend="chunkwise")
    plain = results_and_gradients(delta_rule, inputs, backend="chunkwise")
    # Four rounded operands lie between input and result: state, inverse, corrections, scores.
    assert_within_reference(actual, exact, plain, inputs, rounding=dtype, floor=4.0)


def launched_kernels(inputs: DeltaRuleInputs, **options: Any) -> set[str]:
    """The Gluon kernels that a call launches."""
    names = set()

    def record(kernel: Any, *arguments: Any) -> None:
        if is_gluon(kernel):
            names.add(kernel.fn.__name__)
        launch(kernel, *arguments)

    with launched_by(record):
        results_and_gradients(delta_rule, inputs, backend="triton", **options)
    return names


CASES = [
    *(shaped(f"{decay}_tokens_{T}", T=T, decay=decay) for decay in DECAYS for T in (1, 64, 77, 256)),
    *(shaped(f"{decay}_fresh", B=3, T=200, groups=2, decay=decay, initial_state=False) for decay in DECAYS),
    *(shaped(f"{decay}_many", B=9, T=130, H=4, groups=2, decay=decay) for decay in DECAYS),
    *(shaped(f"{decay}_resets", T=130, decay=decay, log_decay="reset") for decay in DECAYS[1:]),
    *(shaped(f"{decay}_erase", T=200, decay=decay, erase="gated", groups=2) for decay in DECAYS),
    shaped("scalar_undecayed", T=200, decay="scalar", erase="gated", erase_reads="undecayed"),
    *(shaped(f"{decay}_segments", B=1, T=4230, H=1, decay=decay, log_decay=-0.002, beta=0.5) for decay in DECAYS),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.gpu
@pytest.mark.skipif(no_kernels(), reason="needs a Hopper GPU and Gluon")
def test_agrees_with_the_reference(case: DeltaRuleCase, dtype: torch.dtype) -> None:
    assert_right(case.make(device="cuda", dtype=dtype), dtype)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("first_large", [0, 64, 300, 511])
@pytest.mark.gpu
@pytest.mark.skipif(no_kernels(), reason="needs a Hopper GPU and Gluon")
def test_hands_over_to_strict_launches_in_the_middle_of_a_row(first_large: int, decay: str) -> None:
    inputs = shaped("hand_over", T=512, decay=decay).make(device="cuda", dtype=torch.bfloat16)
    inputs.beta[0, first_large] = 1.9  # and the other row has no such chunk
    assert_right(inputs, torch.bfloat16)


@pytest.mark.parametrize("beta", [0.5, 0.98, 1.9])
@pytest.mark.gpu
@pytest.mark.skipif(no_kernels(), reason="needs a Hopper GPU and Gluon")
def test_repeated_keys(beta: float) -> None:
    inputs = shaped("repeated", T=2048, H=4, keys="same", beta=beta).make(device="cuda", dtype=torch.bfloat16)
    actual = results_and_gradients(delta_rule, inputs, backend="triton")
    exact = results_and_gradients(delta_rule, inputs.double(), backend="chunkwise")
    assert max(relative_errors(actual, exact, inputs).values()) < 0.05


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.gpu
@pytest.mark.skipif(no_kernels(), reason="needs a Hopper GPU and Gluon")
def test_same_bits_from_run_to_run(decay: str) -> None:
    inputs = shaped("bits", B=10, T=650, H=8, decay=decay).make(device="cuda", dtype=torch.bfloat16)
    first, *others = (results_and_gradients(delta_rule, inputs, backend="triton") for _ in range(4))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
