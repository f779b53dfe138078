"""The fused forward pass in Gluon: compiled for sm_90a without a GPU, and against float64 on one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_rule_cases import DeltaRuleCase, DeltaRuleInputs
from fresh_process import run_interpreted
from helpers import assert_within_reference, relative_errors
from torch import Tensor

from deltazoo.layers import bounded_step
from deltazoo.ops import delta_rule
from deltazoo.ops.autograd_modes import scanning_again
from deltazoo.ops.call import RuleCall

pytest.importorskip("triton")

from ops.triton.launches import arguments_of, launched_by, routed  # noqa: E402

from deltazoo.ops.triton import plan  # noqa: E402
from deltazoo.ops.triton.forward import complete, forward, infer  # noqa: E402
from deltazoo.ops.triton.gluon import MISSING  # noqa: E402
from deltazoo.ops.triton.launch import Constants  # noqa: E402
from deltazoo.ops.triton.plan import Card  # noqa: E402
from deltazoo.ops.triton.problem import (  # noqa: E402
    Kept,  # noqa: E402
    Problem,
    fake_plan,
)

CHUNK = 64
DECAYS = ("none", "scalar", "channel")
STRONG = (-1e-3, -0.1, -5.0, -50.0, "mixed", "reset")
compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or MISSING is not None, reason=MISSING or "the interpreter knows no Gluon"
)


def shaped(name: str = "fused", **options: Any) -> DeltaRuleCase:
    return DeltaRuleCase(name, **dict(B=2, T=256, H=2, K=128, V=128, beta=0.9) | options)


# -- without a GPU ---------------------------------------------------------------------------------


def meta_call(
    decay: str, groups: int = 1, state: bool = False, strict: bool | None = None, dtype: torch.dtype = torch.bfloat16,
    **sizes: int,
) -> RuleCall:  # fmt: skip
    """A call on meta tensors that fills a card."""
    size = dict(B=8, T=4096, HV=16, D=128) | sizes
    B, T, HV, D = size.values()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k = (empty(B, T, HV // groups, D, dtype=dtype) for _ in range(2))
    log_decay = {"none": None, "scalar": empty(B, T, HV), "channel": empty(B, T, HV, D)}[decay]
    initial = empty(B, HV, D, D) if state else None
    return RuleCall(q, k, empty(B, T, HV, D, dtype=dtype), empty(B, T, HV), log_decay, 0.1, initial, None, strict)


def launches(call: RuleCall) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The first launches of an inference call by kernel name: kernel and arguments by name."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}

    def record(kernel: Any, constants: Constants, *tensors: Any) -> None:
        found.setdefault(kernel.fn.__name__, (kernel, arguments_of(kernel, constants, tensors)))

    with launched_by(record), routed(forward="fused"):
        infer(Problem(call))
    return found


def launched(call: RuleCall) -> list[str]:
    """The kernels of an inference call on a Hopper card, in their order."""
    found: list[str] = []
    with launched_by(lambda kernel, *_: found.append(kernel.fn.__name__)), routed(Card(gluon=True)):
        infer(Problem(call))
    return found


@compiles
@pytest.mark.parametrize(
    ("decay", "strict"),
    [
        ("none", None),
        ("scalar", False),
        ("channel", None),
        pytest.param("none", False, marks=pytest.mark.sweep),
        pytest.param("scalar", None, marks=pytest.mark.sweep),
        pytest.param("channel", False, marks=pytest.mark.sweep),
    ],
)
def test_compiles_with_products_in_flight(decay: str, strict: bool | None) -> None:
    assert_fits(meta_call(decay, strict=strict))


def assert_fits(call: RuleCall) -> None:
    """The fused kernel, the first that is launched, compiles without what makes products wait."""
    from ops.triton.gluon_compile import SHARED_MEMORY, compile_kernel
    from ops.triton.machine_code import more_spilled

    compiled = compile_kernel(*launches(call)["hopper_forward_kernel"])
    print(compiled)
    assert not compiled.warnings
    assert compiled.spilled <= 256 + more_spilled(64)  # addresses and counters
    assert compiled.shared <= SHARED_MEMORY


@compiles
@pytest.mark.parametrize("decay", ["scalar", pytest.param("none", marks=pytest.mark.sweep)])
def test_ends_of_segments_compile_with_products_in_flight(decay: str) -> None:
    assert_fits(meta_call(decay, B=1, T=32768))


@compiles
def test_preparing_the_rest_fits_the_card() -> None:
    from ops.triton.machine_code import more_spilled
    from ops.triton.test_compile import Launch, used_by

    kernel, arguments = launches(meta_call("scalar", groups=2))["prepare_rest_kernel"]
    used = used_by(Launch(kernel, arguments).compile(90))
    print(used)
    assert used["registers"] <= 255 and used["spilled"] <= 96 + more_spilled(400)


def test_a_program_per_chunk_has_the_limits_of_a_grid() -> None:
    with pytest.raises(NotImplementedError, match="65535 rows"):
        fake_plan(meta_call("none", B=2**16, T=64, HV=1)).chunk_grid()


def test_launches() -> None:
    """Fast: one kernel; by gain two more, which complete what it leaves, per channel in any precision.

    In segments a first kernel, with others for what it leaves, a scan of transitions, and the chain come before.
    """
    rest = ["prepare_rest_kernel", "scan_kernel"]
    if MISSING is None:
        assert list(launches(meta_call("none", strict=False))) == ["hopper_forward_kernel"]
        assert list(launches(meta_call("none"))) == ["hopper_forward_kernel", *rest]
        rest = ["prepare_channel_rest_kernel", "scan_kernel"]
        assert list(launches(meta_call("channel", strict=False))) == ["hopper_forward_kernel", *rest]
        long, first = dict(B=1, T=32768), launched(meta_call("none", strict=False, B=1, T=32768))
        scan, chain, forward = "hopper_scan_kernel", "chain_kernel", "hopper_forward_kernel"
        assert first == [forward, scan, chain, forward]
        rest = ["prepare_rest_kernel", scan]
        assert launched(meta_call("scalar", **long)) == [forward, *rest, scan, scan, chain, forward, scan]


def test_says_why_a_call_is_left_to_several_kernels() -> None:
    def obstacle(multiprocessors: int = 132, **options: Any) -> str | None:
        with routed(Card(gluon=True, multiprocessors=multiprocessors)):
            return fake_plan(meta_call(**dict(decay="scalar", T=1024) | options)).route.why.get("forward")

    assert obstacle() is None and obstacle(decay="none", groups=4, state=True, strict=False) is None
    assert obstacle(decay="channel") is None
    assert obstacle(B=1, HV=80) is None and obstacle(B=1, HV=264) is None
    for heads in (32, 79, 133, 158):
        assert obstacle(B=1, HV=heads) == f"{heads} heads in all leave multiprocessors idle"
    # Rows are cut to make more heads of them.
    assert obstacle(B=1, T=32768) is None
    assert obstacle(B=1, T=32768, decay="channel") == "long rows are cut into segments"
    assert obstacle(B=1, T=8192) == "64 heads in all leave multiprocessors idle"
    assert obstacle(dtype=torch.float16) == "inputs are torch.float16"
    assert obstacle(strict=True) == "precision is strict"
    assert obstacle(D=64) == "heads have 64 key and 64 value channels, not 128"


def test_a_forward_pass_that_keeps_states_is_fused_where_both_passes_are() -> None:
    """The table says so of both, and of calls that scan again, which keep chunks or nothing but their inputs."""

    def route(**options: Any) -> Any:
        with routed(Card(gluon=True)):
            return fake_plan(meta_call(**dict(decay="scalar") | options)).route

    both, kda, few, strict = route(), route(decay="channel"), route(B=3, T=1024), route(strict=True)
    assert both.forward == both.recorded == both.backward == "fused" and both.forward_keeping("states") == "fused"
    assert kda.forward == "fused" and kda.recorded == kda.backward == "stages"
    assert kda.why["recorded"] == kda.why["backward"] == "decay is per channel"
    assert strict.why["forward"] == strict.why["recorded"] == "precision is strict"
    assert few.backward == "stages" and few.why["recorded"] == "48 heads in all leave multiprocessors idle"
    assert both.keeps_to_scan_again == "chunks" and both.forward_keeping("chunks") == "stages"
    fast = route(strict=False)
    assert fast.keeps_to_scan_again == "inputs" and fast.forward_keeping("inputs") == "fused"


def complete_what_is_left() -> None:
    """From the state at a chunk on: the same bits as the whole, and nothing else is touched."""
    for decay in ("none", "scalar"):
        case = DeltaRuleCase(decay, B=2, T=200, H=1, groups=2, K=16, V=16, decay=decay, initial_state=True, beta=0.7)
        inputs = case.make(dtype=torch.float16)
        inputs.beta[1, [150, 195], 1] = 1.9

        def cut(tokens: int, x: DeltaRuleInputs = inputs) -> Problem:
            q, k, v, beta = (t[:, :tokens] for t in (x.q, x.k, x.v, x.beta))
            log_decay = None if x.log_decay is None else x.log_decay[:, :tokens]
            return Problem(RuleCall(q, k, v, beta, log_decay, 0.25, x.initial_state, None, None, None, False, 1))

        output, final, _ = forward(cut(200))
        _, state, _ = forward(cut(128))
        found, found_final = output.clone(), final.clone()
        found[1, 128:, 1], found_final[1, 1] = float("nan"), state[1, 1]
        left, stopped = cut(200), torch.tensor([[4, 4], [4, 2]], dtype=torch.int32)
        kept = Kept.empty(left.plan, left.q, keep=False)
        assert kept.large_gain is not None
        kept.large_gain.zero_().view(2, 4, 2)[1, 2:, 1] = 1
        complete(left, kept, stopped, found, found_final)
        assert torch.equal(found, output) and torch.equal(found_final, final), decay


def test_completes_what_is_left_interpreted() -> None:
    run_interpreted(Path(__file__))


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few heads take the fused kernel too."""
    from deltazoo.ops.triton.gluon import available

    if not available(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and a Triton with Gluon")
    monkeypatch.setattr(plan, "segments_of", lambda chunks, programs: (1, chunks))  # the kernel takes whole rows
    with routed(forward="fused"):
        yield


def call(inputs: DeltaRuleInputs, **options: Any) -> dict[str, Tensor]:
    output, final_state = delta_rule(**inputs.arguments(), **options)
    return {"output": output, "final_state": final_state}


def assert_right(inputs: DeltaRuleInputs, **options: Any) -> None:
    exact = call(inputs.double(), backend="chunkwise")
    plain = call(inputs, backend="chunkwise")
    actual = call(inputs, backend="triton", **options)
    assert_within_reference(actual, exact, plain, inputs, rounding=torch.bfloat16, floor=4.0)


@pytest.mark.gpu
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("precision", [None, "fast"])
@pytest.mark.parametrize("T", [1, 64, 65, 128, 1000, 4096])
@pytest.mark.parametrize("decay", DECAYS)
def test_agrees_with_the_loop(decay: str, T: int, precision: str | None) -> None:
    case = shaped(T=T, groups=1 + T % 3, decay=decay, initial_state=T != 64)
    assert_right(case.make(device="cuda", dtype=torch.bfloat16), precision=precision)


@pytest.mark.gpu
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(("decay", "log_decay"), [*product(("scalar", "channel"), STRONG), ("channel", "uneven")])
def test_decays(decay: str, log_decay: float | str) -> None:
    assert_right(shaped(decay=decay, log_decay=log_decay).make(device="cuda", dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("keys", ["short", "long", "zero", "some_zero", "same", "alternating", "correlated"])
def test_keys(keys: str) -> None:
    inputs = shaped(T=512, keys=keys, beta=0.5).make(device="cuda", dtype=torch.bfloat16)
    if keys in ("same", "alternating", "correlated"):
        exact = call(inputs.double(), backend="chunkwise")
        assert max(relative_errors(call(inputs, backend="triton"), exact, inputs).values()) < 0.05
    else:
        assert_right(inputs)


@pytest.mark.gpu
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("T", [2048, 16384])
@pytest.mark.parametrize("keys", ["same", "alternating", "correlated"])
@pytest.mark.parametrize("beta", [0.3, 0.5, 0.6, 0.98, 1.0, 1.5, 1.98, 2.0])
def test_repeated_keys(T: int, keys: str, beta: float) -> None:
    inputs = shaped(B=1, T=T, H=4, keys=keys, beta=beta).make(device="cuda", dtype=torch.bfloat16)
    inputs = replace(inputs, beta=bounded_step(inputs.beta, inputs.k))
    exact = call(inputs.double(), backend="chunkwise")
    assert max(relative_errors(call(inputs, backend="triton"), exact, inputs).values()) < 0.05


def with_large_gain(decay: str, at: int) -> tuple[DeltaRuleInputs, DeltaRuleInputs]:
    """Inputs without a large gain, and the same with one of value head 1 of row 1 at token `at`."""
    case = shaped(T=512, groups=2, decay=decay, initial_state=True)
    before, after = (case.make(device="cuda", dtype=torch.bfloat16) for _ in range(2))
    after.beta[1, at, 1] = 1.9
    return before, after


@pytest.mark.gpu
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(("decay", "at"), product(DECAYS, (0, 63, 64, 300, 511)))
def test_hands_over_at_a_large_gain(decay: str, at: int) -> None:
    """To the strict kernels: right in the whole, without a change before the chunk or in another head."""
    before, after = with_large_gain(decay, at)
    assert_right(after)
    a, b = call(before, backend="triton"), call(after, backend="triton")
    chunk = at // CHUNK * CHUNK
    assert torch.equal(a["output"][:, :chunk], b["output"][:, :chunk])
    assert not torch.equal(a["output"][1, at:, 1], b["output"][1, at:, 1])
    a["output"][1, :, 1], a["final_state"][1, 1] = b["output"][1, :, 1], b["final_state"][1, 1]
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.gpu
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("decay", DECAYS)
def test_same_bits_from_run_to_run_and_none_from_the_future(decay: str) -> None:
    inputs = shaped(B=8, T=1024, H=16, decay=decay).make(device="cuda", dtype=torch.bfloat16)
    first = call(inputs, backend="triton")
    for _ in range(20):
        again = call(inputs, backend="triton")
        assert all(torch.equal(first[name], again[name]) for name in first)
    for name in ("q", "k", "v", "beta", "log_decay"):
        if getattr(inputs, name) is not None:
            getattr(inputs, name)[:, 500:] *= 0.5
    assert torch.equal(call(inputs, backend="triton")["output"][:, :500], first["output"][:, :500])


@pytest.mark.gpu
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("decay", DECAYS)
def test_in_a_graph_the_gain_decides_at_every_replay(decay: str) -> None:
    before, after = with_large_gain(decay, 300)
    call(before, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(before, backend="triton")
    for inputs in (before, after):
        before.beta.copy_(inputs.beta.clone())
        graph.replay()
        expected = call(before, backend="triton")
        assert all(torch.equal(captured[name], expected[name]) for name in captured)


@pytest.mark.gpu
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("precision", [None, "fast"])
@pytest.mark.parametrize(("decay", "T", "state"), [("none", 512, False), ("scalar", 1000, True), ("none", 650, True)])
def test_segments(decay: str, T: int, state: bool, precision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, with large gains in some segments, and the same bits in a graph."""
    monkeypatch.setattr(plan, "segments_of", lambda chunks, programs: (-(-chunks // 3), 3))
    inputs = shaped(T=T, groups=2, decay=decay, initial_state=state).make(device="cuda", dtype=torch.bfloat16)
    assert_right(inputs, precision=precision)
    if precision is None:
        inputs.beta[1, [70, 200, 450], [1, 0, 0]] = 1.9
        assert_right(inputs)
    expected = call(inputs, backend="triton", precision=precision)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(inputs, backend="triton", precision=precision)
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(captured[name], expected[name]) for name in captured)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
def test_serves_where_heads_fill_the_card(decay: str) -> None:
    """Within rounding of the kernels that a recorded call takes if its backward pass is to scan again."""
    inputs = shaped(B=8, H=16, decay=decay).make(device="cuda", dtype=torch.bfloat16)
    given = RuleCall(inputs.q, inputs.k, inputs.v, inputs.beta, inputs.log_decay, 0.1, None, None)
    if fake_plan(given).route.forward != "fused":
        pytest.skip("needs a Hopper card with up to 213 multiprocessors")
    with scanning_again():
        recorded = call(replace(inputs, v=inputs.v.clone().requires_grad_()), backend="triton")
    for name, found in call(inputs, backend="triton").items():
        difference = (found - recorded[name]).float().norm() / recorded[name].float().norm()
        assert difference < 2**-7


if __name__ == "__main__":
    torch.set_num_threads(1)
    complete_what_is_left()
