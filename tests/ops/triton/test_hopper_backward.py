"""The fused backward on Hopper: compiled for sm_90a without a GPU, and its results on one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from delta_rule_cases import DeltaRuleCase, DeltaRuleInputs  # noqa: E402
from fresh_process import run_interpreted  # noqa: E402
from helpers import assert_within_reference, relative_errors, results_and_gradients  # noqa: E402
from ops.triton.gluon_compile import SHARED_MEMORY, compile_kernel  # noqa: E402
from ops.triton.machine_code import more_spilled  # noqa: E402
from ops.triton.test_hopper import Call, launched_kernels, no_kernels, sizes  # noqa: E402

from deltazoo.ops import DeltaRuleOutput, delta_rule  # noqa: E402
from deltazoo.ops.autograd_modes import scanning_again  # noqa: E402
from deltazoo.ops.call import RuleCall  # noqa: E402
from deltazoo.ops.triton import plan  # noqa: E402
from deltazoo.ops.triton.forward import forward  # noqa: E402
from deltazoo.ops.triton.gluon import MISSING  # noqa: E402
from deltazoo.ops.triton.hopper import small_step_gradients  # noqa: E402
from deltazoo.ops.triton.problem import Problem  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Gluon has no interpreter"),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]


def on_hopper(test: Any) -> Any:
    """A test of results, where small cases take the fused backward too."""
    skipped = pytest.mark.skipif(no_kernels(), reason="needs a Hopper GPU and Gluon")
    return pytest.mark.gpu(skipped(pytest.mark.usefixtures("few_heads_suffice")(test)))


DECAYS = ("none", "scalar")


@pytest.mark.parametrize(
    "call",
    [
        Call(decay="none"),
        Call(decay="scalar", strict=False, keep=False),
        pytest.param(Call(decay="scalar"), marks=pytest.mark.sweep),
        pytest.param(Call(decay="none", strict=False), marks=pytest.mark.sweep),
        pytest.param(Call(decay="scalar", keep=False), marks=pytest.mark.sweep),
        pytest.param(Call(decay="scalar", strict=False, state=False), marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_compiles_with_products_in_flight(call: Call) -> None:
    launches = call.launches()
    names = [kernel.fn.__name__ for kernel, _ in launches]
    count = 2 if call.strict is None else 1
    before = ["hopper_scan_kernel"] * (count if call.keep else 2 * count)
    if call.keep:
        before[0] = "hopper_forward_kernel"
    if not call.keep and call.strict is False:  # it keeps nothing, and runs again
        before = ["hopper_forward_kernel"] * 2
    assert names == before + ["backward_kernel"] * count
    for kernel, arguments in launches:
        compiled = compile_kernel(kernel, arguments)
        print(compiled)
        assert compiled.shared <= SHARED_MEMORY
        # What the loop does not change, most of it; second terms take registers too.
        if kernel.fn.__name__ == "hopper_forward_kernel":
            allowed = 760 if arguments["INITIAL"] else 160
        else:
            few, many = (0, 350) if kernel.fn.__name__ == "hopper_scan_kernel" else (200, 650)
            allowed = many if arguments["STRICT"] else few
        assert compiled.spilled <= allowed + more_spilled(1100 if arguments.get("STRICT") else 300)
        waiting = [line for line in compiled.warnings if "C7519" not in line]  # that one costs next to nothing
        assert not waiting


def gradients_of_small_steps() -> None:
    """`tiny_steps_kernel` against a loop over tokens, for any rows Z."""
    for decay, T, state in (("none", 150, True), ("scalar", 128, False)):
        case = DeltaRuleCase("small", B=2, T=T, H=1, groups=2, K=16, V=128, decay=decay, initial_state=state)
        x = case.make(dtype=torch.float16)
        x.beta[0, ::5], x.beta[1, 60:80, 0], x.beta[1, :, 1], x.beta[1, 20, 0] = 0.0, 2**-41, 0.9, 1.9
        p = Problem(RuleCall(x.q, x.k, x.v, x.beta, x.log_decay, 0.25, x.initial_state, None, None, None, False, 1))
        kept, constants = forward(p, keep=False)[2], small_step_gradients._tiny_steps(p.plan)
        Z, d_beta = torch.randn(x.v.shape).half(), torch.full(x.beta.shape, torch.inf)
        dv = Z.clone()
        small_step_gradients.tiny_steps_kernel[constants.grid](
            p.k, p.v, kept.beta, kept.G, kept.AP, p.initial_state, dv, d_beta, **constants.named
        )
        S = p.initial_state.clone() if state else torch.zeros(2, 2, 16, 128)
        expected = torch.full_like(d_beta, torch.inf)
        for t in range(T):
            S *= 1.0 if x.log_decay is None else x.log_decay[:, t].exp()[..., None, None]
            k = x.k[:, t].float().repeat_interleave(2, 1)
            correction = x.v[:, t] - torch.einsum("bhk,bhkv->bhv", k, S)
            step = x.beta[:, t].float()
            expected[:, t] = torch.where(step <= 2**-40, (Z[:, t] * correction).sum(-1), torch.inf)
            S += torch.einsum("bhk,bhv->bhkv", k, step[..., None] * correction)
        small = expected.isfinite()
        assert torch.equal(d_beta.isfinite(), small)
        assert (d_beta - expected)[small].norm() < 1e-3 * expected[small].norm()
        assert torch.equal(dv, torch.where(small[..., None], (x.beta[..., None].float() * Z).half(), Z))


def test_plain_kernels_interpreted() -> None:
    run_interpreted(Path(__file__))


def test_says_why_a_call_takes_several_kernels() -> None:
    many = dict(q=torch.Size([64, 256, 2, 128]), v=torch.Size([64, 256, 4, 128]))
    assert sizes(**many).fused_backward and "backward" not in sizes(**many).route.why
    refused = {
        "inputs are float32": dict(dtype=torch.float32),
        "inputs are torch.float16": dict(dtype=torch.float16),
        "decay is per channel": dict(decay="channel"),
        "the erase reads with other keys or before the decay": dict(undecayed=True),
        "precision is strict": dict(strict=True),
        "there are few heads": dict(q=torch.Size([2, 256, 2, 128]), v=torch.Size([2, 256, 4, 128])),
    }
    assert sizes(q=torch.Size([1, 2**15, 16, 128]), v=torch.Size([1, 2**15, 16, 128])).fused_backward
    for reason, changes in refused.items():
        changed = sizes(**many | changes)
        assert changed.route.why["backward"] == reason and not changed.fused_backward


@pytest.fixture
def few_heads_suffice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plan, "MIN_HEADS", 1)
    monkeypatch.setattr(plan, "MIN_BUSY", 0.0)
    plan.plan_for.cache_clear()
    yield
    plan.plan_for.cache_clear()


def shaped(name: str, **options: object) -> DeltaRuleCase:
    options = {"B": 2, "T": 256, "H": 2, "K": 128, "V": 128, "beta": 0.9, "initial_state": True} | options
    return DeltaRuleCase(name, **options)  # type: ignore[arg-type]


def assert_right(inputs: DeltaRuleInputs, **options: Any) -> None:
    assert "backward_kernel" in launched_kernels(inputs, **options)
    actual = results_and_gradients(delta_rule, inputs, backend="triton", **options)
    exact = results_and_gradients(delta_rule, inputs.double(), backend="chunkwise")
    plain = results_and_gradients(delta_rule, inputs, backend="chunkwise")
    # Four rounded operands lie between input and result: state, inverse, corrections, scores.
    assert_within_reference(actual, exact, plain, inputs, rounding=inputs.q.dtype, floor=4.0)


CASES = [
    *(shaped(f"{decay}_tokens_{T}", T=T, decay=decay) for decay in DECAYS for T in (1, 64, 77, 128, 1024)),
    *(shaped(f"{decay}_fresh", B=3, H=5, decay=decay, initial_state=False) for decay in DECAYS),
    *(shaped(f"{decay}_groups", T=200, groups=3, decay=decay) for decay in DECAYS),
    *(shaped(f"{decay}_segments", B=1, T=4100, decay=decay) for decay in DECAYS),
    *(shaped(f"scalar_decay_{g}", decay="scalar", log_decay=g) for g in (0.0, -1e-4, -5.0, -50.0, "mixed", "reset")),
    *(shaped(f"{decay}_beta_{beta}", decay=decay, beta=beta) for decay in DECAYS for beta in (0.0, 0.01, 0.5, 1.0)),
    *(shaped(f"{decay}_correlated", decay=decay, keys="correlated", beta=0.9) for decay in DECAYS),
    *(shaped(f"{decay}_some_zero_keys", decay=decay, keys="some_zero", beta="uniform") for decay in DECAYS),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@on_hopper
def test_agrees_with_the_reference(case: DeltaRuleCase) -> None:
    assert_right(case.make(device="cuda", dtype=torch.bfloat16))


@pytest.mark.parametrize("T", [300, 320])
@pytest.mark.parametrize("decay", DECAYS)
@on_hopper
def test_step_sizes_of_every_size_and_zero(decay: str, T: int) -> None:
    inputs = shaped("step_sizes", T=T, decay=decay).make(device="cuda", dtype=torch.bfloat16)
    beta = inputs.beta
    beta.copy_(10 ** (-12 * torch.rand(beta.shape, generator=torch.Generator().manual_seed(0))))
    beta[:, ::7] = 0
    assert_right(inputs, precision="fast")


@pytest.mark.parametrize("decay", DECAYS)
@on_hopper
def test_small_step_sizes_beside_large_gains_and_in_segments(decay: str) -> None:
    inputs = shaped("some", B=1, T=4160, decay=decay).make(device="cuda", dtype=torch.bfloat16)
    inputs.beta[:, 5::9] = 0
    inputs.beta[0, 1000, 0] = 1.9
    assert_right(inputs)


@pytest.mark.parametrize("large_gain", [0, 130])
@pytest.mark.parametrize("case", CASES, ids=str)
@on_hopper
def test_strict_scans(case: DeltaRuleCase, large_gain: int) -> None:
    inputs = case.make(device="cuda", dtype=torch.bfloat16)
    inputs.beta[-1, min(large_gain, case.T - 1), -1] = 1.9
    with scanning_again():  # otherwise the fused forward pass serves
        assert "hopper_forward_kernel" not in launched_kernels(inputs)
        assert_right(inputs)


@pytest.mark.parametrize("large_gain", [None, 0, 130])
@pytest.mark.parametrize("case", CASES, ids=str)
@on_hopper
def test_recorded_forward_pass(case: DeltaRuleCase, large_gain: int | None) -> None:
    inputs = case.make(device="cuda", dtype=torch.bfloat16)
    if large_gain is not None:
        inputs.beta[-1, min(large_gain, case.T - 1), -1] = 1.9
    assert ("hopper_forward_kernel" in launched_kernels(inputs)) == (case.T < 4096)  # longer rows are cut into segments
    assert_right(inputs)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("groups", [1, 2])
@on_hopper
def test_heads_with_a_large_gain_are_strict(decay: str, groups: int) -> None:
    inputs = shaped("some", T=320, groups=groups, decay=decay).make(device="cuda", dtype=torch.bfloat16)
    usual = results_and_gradients(delta_rule, inputs, backend="triton")
    inputs.beta[0, 100, 0], inputs.beta[1, 319, 1] = 1.9, 1.5
    assert_right(inputs)
    changed = results_and_gradients(delta_rule, inputs, backend="triton")
    for row, head in ((0, 1), (1, 0)):  # the heads beside them
        assert torch.equal(usual["d_v"][row, :, head], changed["d_v"][row, :, head])


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("beta", [0.5, 0.98])
@on_hopper
def test_repeated_keys(beta: float, decay: str) -> None:
    case = shaped("repeated", T=2048, H=4, keys="same", beta=beta, decay=decay, log_decay=-1e-3)
    inputs = case.make(device="cuda", dtype=torch.bfloat16)
    assert "backward_kernel" in launched_kernels(inputs)
    actual = results_and_gradients(delta_rule, inputs, backend="triton")
    exact = results_and_gradients(delta_rule, inputs.double(), backend="chunkwise")
    assert max(relative_errors(actual, exact, inputs).values()) < 0.05


class RecordedCall:
    """A recorded call, and its gradients by way of autograd."""

    def __init__(
        self,
        inputs: DeltaRuleInputs,
        compiled: bool = False,
        recomputed: bool = False,
        precision: str | None = None,
    ) -> None:
        self.leaves = {name: x.clone().requires_grad_() for name, x in inputs.leaves().items()}
        self.d_results = (inputs.d_output, inputs.d_final_state)

        def call(*leaves: Tensor) -> DeltaRuleOutput:
            return delta_rule(**dict(zip(self.leaves, leaves, strict=True)), backend="triton", precision=precision)

        if compiled:
            torch.compiler.reset()
            call = torch.compile(call, fullgraph=True, backend="aot_eager")
        arguments = tuple(self.leaves.values())
        self.results = tuple(checkpoint(call, *arguments, use_reentrant=False) if recomputed else call(*arguments))

    def gradients(self, retain_graph: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.results, list(self.leaves.values()), self.d_results, retain_graph=retain_graph)


def all_equal(xs: tuple[Tensor, ...], ys: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize("decay", [*DECAYS, "channel"])
@on_hopper
def test_same_bits_every_time_and_every_way(decay: str) -> None:
    inputs = shaped("call", decay=decay).make(device="cuda", dtype=torch.bfloat16)
    expected = RecordedCall(inputs).gradients()
    twice = RecordedCall(inputs)
    for retain_graph in (True, True, False):
        assert all_equal(twice.gradients(retain_graph), expected)
    with scanning_again():
        first, again = RecordedCall(inputs).gradients(), RecordedCall(inputs)
    for retain_graph in (True, False):
        assert all_equal(again.gradients(retain_graph), first)
    # Where the fused forward pass serves, a second scan repeats other roundings.
    assert decay != "channel" or all_equal(first, expected)
    with scanning_again():  # fast, the fused forward pass runs again
        again = RecordedCall(inputs, precision="fast")
    for retain_graph in (True, False):
        assert all_equal(again.gradients(retain_graph), expected)
    assert all_equal(RecordedCall(inputs, recomputed=True).gradients(), expected)
    assert all_equal(RecordedCall(inputs, compiled=True).gradients(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = RecordedCall(inputs).gradients()
    graph.replay()
    torch.cuda.synchronize()
    assert all_equal(captured, expected)


if __name__ == "__main__":
    torch.set_num_threads(1)
    gradients_of_small_steps()
