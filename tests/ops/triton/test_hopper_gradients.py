"""The chunk gradients for decay per channel in Gluon: compiled for sm_90a, on a model of a thread block, on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from delta_rule_cases import DeltaRuleCase  # noqa: E402
from helpers import assert_within_reference, relative_errors, results_and_gradients  # noqa: E402
from ops.triton.gluon_compile import SHARED_MEMORY, Compiled, compile_kernel  # noqa: E402
from ops.triton.launches import HOPPER, arguments_of, launched_by, routed  # noqa: E402
from ops.triton.machine_code import more_spilled  # noqa: E402
from ops.triton.test_compiled_code import Modelled  # noqa: E402
from ops.triton.test_hopper import sizes  # noqa: E402
from ptx.thread_block import Program  # noqa: E402

from deltazoo.ops import delta_rule  # noqa: E402
from deltazoo.ops.call import RuleCall  # noqa: E402
from deltazoo.ops.triton.backward import backward  # noqa: E402
from deltazoo.ops.triton.forward import forward  # noqa: E402
from deltazoo.ops.triton.gluon import MISSING, available  # noqa: E402
from deltazoo.ops.triton.launch import Constants, launch  # noqa: E402
from deltazoo.ops.triton.plan import Plan  # noqa: E402
from deltazoo.ops.triton.problem import Problem  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Gluon has no interpreter"),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
SPILLED = {"hopper_chunk_gradients_channel_kernel": (64, 128), "hopper_chunk_gradients_strong_kernel": (640, 740)}
"""The kernels, and how many bytes per thread they may spill, without erase keys and with."""
CASE = DeltaRuleCase("channel", B=1, T=100, H=1, K=128, V=128, decay="channel", log_decay=-0.05, beta=0.7)
"""Two chunks, the second one not full."""


def hard_inputs(case: DeltaRuleCase, **options: Any) -> Any:
    """Inputs with some step sizes so small that d_beta is a sum, one that is zero, and one channel that decays fast.

    A full chunk decays by 2^148 in that channel, so that its factors must be those from and to the middle.
    """
    inputs = case.make(dtype=torch.bfloat16, **options)
    inputs.beta[:, ::3] *= 0.05
    inputs.beta[:, 5:6] = 0.0
    inputs.log_decay[..., 3] = -1.6
    return inputs


def strong_inputs(case: DeltaRuleCase, **options: Any) -> Any:
    """The same, and tiles of channels that need no blocks of their own, halves, quarters, and all, with resets."""
    inputs = hard_inputs(case, **options)
    inputs.log_decay[..., 40::16] = -3.2
    inputs.log_decay[..., 70::8] *= 120.0
    inputs.log_decay[..., 100] = -40.0
    inputs.log_decay[:, ::9, :, 110] = float("-inf")
    inputs.log_decay[:, 7::20, :, 120:] = -70.0
    return inputs


def far_inputs(case: DeltaRuleCase, **options: Any) -> Any:
    """The same, with every tile of channels beyond the range of one product."""
    inputs = hard_inputs(case, **options)
    inputs.log_decay[..., ::8] = -3.2
    return inputs


def compiled_well(kernel: Any, arguments: dict[str, Any]) -> Compiled:
    """The kernel compiled: registers and products in flight as they should be."""
    compiled = compile_kernel(kernel, arguments)
    print(compiled)
    erase = arguments["erase_key"] is not None
    assert compiled.spilled <= SPILLED[kernel.fn.__name__][erase] + more_spilled(280)
    assert 2 * (compiled.shared + 1024) <= SHARED_MEMORY + 1024  # two programs per multiprocessor
    assert not compiled.warnings
    return compiled


@pytest.mark.parametrize(
    ("groups", "decays", "erase", "in_place"),
    [
        (1, torch.bfloat16, False, True),
        (1, torch.bfloat16, True, False),
        (2, torch.float32, False, False),
        pytest.param(1, torch.bfloat16, False, False, marks=pytest.mark.sweep),
        pytest.param(2, torch.float32, True, False, marks=pytest.mark.sweep),
        pytest.param(2, torch.float32, False, True, marks=pytest.mark.sweep),
    ],
)
def test_compiles_well_and_sums_decays_in_float32(
    groups: int, decays: torch.dtype, erase: bool, in_place: bool
) -> None:
    def record(kernel: Any, constants: Constants, *tensors: Any) -> None:
        launches[kernel.fn.__name__] = kernel, arguments_of(kernel, constants, tensors)

    launches: dict[str, Any] = {}
    rows = (40, 128) if in_place else (1, 100)
    q, k = (torch.empty(*rows, 2 // groups, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    v, log_decay = (torch.empty(*rows, 2, 128, dtype=dtype, device="meta") for dtype in (torch.bfloat16, decays))
    beta = torch.empty(*rows, 2, device="meta")
    erase_key = torch.empty_like(k) if erase else None
    call = RuleCall(q, k, v, beta, log_decay, 0.1, None, None, None, erase_key)
    with launched_by(record), routed(HOPPER if in_place else None, gradients="gluon"):
        output, _, kept = forward(Problem(call))
        backward(call, kept, output, None, in_place=in_place)
    for name in SPILLED:
        assert (launches[name][1]["d_states_high"] is not None) == in_place
        assert "mul.bf16" not in compiled_well(*launches[name]).ptx


def test_says_why_a_call_is_left_to_the_plain_kernel() -> None:
    def obstacle(**changes: Any) -> str | None:
        return sizes(**dict(decay="channel") | changes).route.why.get("gradients")

    assert obstacle() is None and obstacle(has_erase_key=True) is None
    assert obstacle(dtype=torch.float16) == "inputs are torch.float16"
    packed = dict(sequences=2, q=torch.Size([1, 256, 2, 128]), v=torch.Size([1, 256, 4, 128]))
    assert obstacle(**packed) == "rows are packed"
    assert obstacle(decay="scalar") == "decay is not per channel"


@pytest.mark.sweep
@pytest.mark.parametrize("erase", ["tied", "free"])
@pytest.mark.parametrize("make", [hard_inputs, strong_inputs, far_inputs])
@pytest.mark.parametrize(("groups", "decays"), [(1, torch.float32), (2, torch.bfloat16)])
def test_as_compiled_on_a_model_of_a_thread_block(
    groups: int,
    decays: torch.dtype,
    make: Callable[[DeltaRuleCase], Any],
    erase: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results right; nothing depends on timing."""
    inputs, hazards = make(replace(CASE, groups=groups, erase=erase)), {}
    inputs = replace(inputs, log_decay=inputs.log_decay.to(decays))
    ran = []

    def on_the_model(kernel: Any, constants: Constants, *tensors: Any) -> None:
        if kernel.fn.__name__ not in SPILLED:
            Modelled(kernel, hazards)[constants.grid](*tensors, **constants.named)
            return
        arguments = arguments_of(kernel, constants, tensors)
        compiled = compiled_well(kernel, arguments)
        given = [arguments[p.name] for p in kernel.params if not p.is_constexpr and arguments[p.name] is not None]
        Modelled(kernel, hazards).run(Program(compiled.ptx), given, constants.grid)
        ran.append(kernel)

    # One program looks at both chunks.
    monkeypatch.setattr(Plan, "neighbour_grid", lambda plan: ((1,), dict(chunks=plan.slots, slots=plan.slots)))
    x = inputs
    call = RuleCall(x.q, x.k, x.v, x.beta, x.log_decay, CASE.K**-0.5, x.initial_state, None, None, x.erase_key)
    with launched_by(on_the_model):
        output, final_state, kept = forward(Problem(call))
        with routed(gradients="gluon"):
            gradients = backward(call, kept, x.d_output, x.d_final_state)
    assert len(ran) == 2
    names = [f"d_{name}" for name in ("q", "k", "v", "beta", "log_decay", "initial_state", "erase_key")]
    actual = {"output": output, "final_state": final_state}
    actual |= {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
    exact = results_and_gradients(delta_rule, x.double(), backend="chunkwise")
    plain = results_and_gradients(delta_rule, x, backend="chunkwise")
    assert_within_reference(actual, exact, plain, x, rounding=torch.bfloat16, floor=4.0)
    assert not hazards


def no_kernels() -> bool:
    return not torch.cuda.is_available() or not available(torch.device("cuda", 0))


CASES = [
    *(replace(CASE, name=f"tokens_{T}", T=T, H=2, B=2) for T in (1, 64, 77, 256)),
    replace(CASE, name="grouped", T=200, B=3, H=2, groups=2, initial_state=True),
    replace(CASE, name="resets", T=130, H=2, log_decay="reset"),
    replace(CASE, name="weak", T=512, H=2, log_decay=-0.001),
    replace(CASE, name="strong", T=512, H=2, log_decay=-1.0),
    replace(CASE, name="segments", T=4230, log_decay=-0.002, beta=0.5),
    replace(CASE, name="uneven", B=3, T=1500, H=4, log_decay="uneven"),
    replace(CASE, name="mixed", B=2, T=300, H=3, log_decay="mixed", initial_state=True),
    replace(CASE, name="other_erase", T=300, H=2, erase="gated"),
    replace(CASE, name="uneven_grouped_other_erase", T=300, H=2, groups=2, erase="free", beta=0.3, log_decay="uneven"),
]


@pytest.mark.parametrize("make", [hard_inputs, strong_inputs, far_inputs])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.gpu
@pytest.mark.skipif(no_kernels(), reason="needs a Hopper GPU and Gluon")
def test_agrees_with_the_reference(case: DeltaRuleCase, make: Callable[..., Any]) -> None:
    names = set()

    def record(kernel: Any, *arguments: Any) -> None:
        names.add(kernel.fn.__name__)
        launch(kernel, *arguments)

    inputs = make(case, device="cuda")
    with launched_by(record):
        actual = results_and_gradients(delta_rule, inputs, backend="triton")
    assert names.issuperset(SPILLED)
    exact = results_and_gradients(delta_rule, inputs.double(), backend="chunkwise")
    plain = results_and_gradients(delta_rule, inputs, backend="chunkwise")
    assert_within_reference(actual, exact, plain, inputs, rounding=torch.bfloat16, floor=4.0)


@pytest.mark.parametrize("beta", [0.5, 0.98, 1.9])
@pytest.mark.gpu
@pytest.mark.skipif(no_kernels(), reason="needs a Hopper GPU and Gluon")
@pytest.mark.parametrize("log_decay", [-0.05, "uneven"])
def test_repeated_keys(beta: float, log_decay: Any) -> None:
    case = replace(CASE, T=2048, H=4, keys="same", beta=beta, log_decay=log_decay)
    inputs = case.make(device="cuda", dtype=torch.bfloat16)
    actual = results_and_gradients(delta_rule, inputs, backend="triton")
    exact = results_and_gradients(delta_rule, inputs.double(), backend="chunkwise")
    assert max(relative_errors(actual, exact, inputs).values()) < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(no_kernels(), reason="needs a Hopper GPU and Gluon")
@pytest.mark.parametrize("log_decay", [-0.05, "uneven"])
def test_same_bits_from_run_to_run(log_decay: Any) -> None:
    inputs = replace(CASE, B=10, T=650, H=8, log_decay=log_decay).make(device="cuda", dtype=torch.bfloat16)
    first, *others = (results_and_gradients(delta_rule, inputs, backend="triton") for _ in range(12))
    for other, name in product(others, first):
        assert torch.equal(first[name], other[name])
