"""The Gluon kernels as compiled for Hopper, run instruction by instruction on a model of a thread block.

The model has groups of warps that go their own ways, barriers in shared memory and the copy engine
(`ptx.warp_groups`). Every case runs with copies at the latest and at the earliest moment, and with another group ahead:
whatever the timing, results are right, and the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from delta_rule_cases import DeltaRuleCase, DeltaRuleInputs
from helpers import assert_within_reference, results_and_gradients
from ptx.program import Program
from ptx.warp_groups import Block
from ptx.warp_groups import Tile as TileInMemory
from torch import Tensor

pytest.importorskip("triton")

from ops.triton.gluon_compile import build  # noqa: E402
from ops.triton.launches import HOPPER, launched_by, routed  # noqa: E402
from ops.triton.machine_code import to_ptx  # noqa: E402
from ops.triton.test_compiled_code import Modelled  # noqa: E402

from deltazoo.ops import delta_rule  # noqa: E402
from deltazoo.ops.call import RuleCall  # noqa: E402
from deltazoo.ops.triton import plan  # noqa: E402
from deltazoo.ops.triton.backward import backward  # noqa: E402
from deltazoo.ops.triton.forward import forward, infer  # noqa: E402
from deltazoo.ops.triton.gluon import MISSING  # noqa: E402
from deltazoo.ops.triton.launch import Constants, TileView  # noqa: E402
from deltazoo.ops.triton.problem import Problem  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Gluon has no interpreter"),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]


@dataclass
class Timing:
    """When things happen: copies `late` or at once, and which group of warps runs `first`."""

    late: bool
    first: int


class Model:
    """Launches that run on the model."""

    def __init__(self, change: Callable[[Program], None] = lambda _: None) -> None:
        self.hazards: dict[str, str] = {}
        self.timing = Timing(True, 0)
        self.programs: dict[Any, Program] = {}
        self.names: list[str] = []
        self.change = change

    def launch(self, kernel: Any, constants: Constants, *tensors: Tensor | TileView | None) -> None:
        self.names.append(kernel.fn.__name__)
        if not getattr(kernel, "is_gluon", lambda: False)():
            Modelled(kernel, self.hazards)[constants.grid](*tensors, **constants.named)
            return
        arguments = dict(zip(kernel.arg_names, tensors, strict=False)) | constants.named
        key = kernel.fn.__name__, tuple(constants.named.items()), tuple(x is None for x in tensors)
        if key not in self.programs:
            with to_ptx():
                self.programs[key] = Program(build(kernel, arguments).asm["ptx"])
            self.change(self.programs[key])
        given = [arguments[x.name] for x in kernel.params if not x.is_constexpr and arguments[x.name] is not None]
        self.run(self.programs[key], given, constants.grid)

    def run(self, program: Program, given: list[Any], grid: tuple[int, ...]) -> None:
        """Copies the tensors into one memory, runs the grid, copies them back."""
        tensors = [x.base if isinstance(x, TileView) else x for x in given]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if isinstance(x, Tensor)}
        starts, end = {}, 256
        for pointer, storage in storages.items():
            starts[pointer], end = end, end + -(-storage.nbytes() // 256) * 256 + 256
        memory = np.zeros(end, np.uint8)
        raw = {p: torch.empty(0, dtype=torch.uint8).set_(s) for p, s in storages.items()}
        for pointer, content in raw.items():
            memory[starts[pointer] : starts[pointer] + len(content)] = content.numpy()

        def start(x: Tensor) -> int:
            return starts[x.untyped_storage().data_ptr()] + x.storage_offset() * x.element_size()

        arguments: list[Any] = []
        for x in given:
            if isinstance(x, TileView):
                arguments.append(TileInMemory(start(x.base), x.shape, x.strides, x.block_shape[-2], x.base.itemsize))
                arguments += [*x.shape, *x.strides]
            else:
                arguments.append(start(x) if isinstance(x, Tensor) else x)
        arguments += [0] * (len(program.parameters) - len(arguments))  # Triton's own scratch memory, unused
        grid = (*grid, 1, 1)[:3]
        for position in product(*map(range, grid)):
            block = Block(program, arguments, memory, position, grid, self.timing.late, self.timing.first)
            self.hazards |= block.run()
        for pointer, content in raw.items():
            content.copy_(torch.from_numpy(memory[starts[pointer] : starts[pointer] + len(content)]))


def results(
    x: DeltaRuleInputs,
    scale: float,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    recorded: bool = True,
    keep: bool = True,
    in_place: bool = True,
) -> dict[str, Tensor]:
    """Results by the kernels on the model; if `recorded` gradients too, `in_place` as autograd wants them."""
    new_empty = Tensor.new_empty

    def uninitialised(like: Tensor, *shape: Any, **options: Any) -> Tensor:
        tensor = new_empty(like, *shape, **options)
        return tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 77)

    with monkeypatch.context() as patch, launched_by(model.launch), routed(HOPPER):
        patch.setattr(plan, "MIN_HEADS", 1)
        patch.setattr(plan, "MIN_BUSY", 0.0)
        patch.setattr(Tensor, "new_empty", uninitialised)
        inputs = (x.q, x.k, x.v, x.beta, x.log_decay, scale, x.initial_state, None, None, x.erase_key, False, 1)
        call = RuleCall(*inputs)
        if not recorded:
            return dict(zip(("output", "final_state"), infer(Problem(call)), strict=True))
        output, final_state, kept = forward(Problem(call), keep)
        gradients = backward(call, kept, x.d_output, x.d_final_state, in_place)
    names = [f"d_{name}" for name in ("q", "k", "v", "beta", "log_decay", "initial_state", "erase_key")]
    found = dict(zip(names, gradients, strict=True))
    return {"output": output, "final_state": final_state} | {n: g for n, g in found.items() if g is not None}


SHORT = DeltaRuleCase("short", B=1, T=130, H=1, K=128, V=128, decay="scalar", initial_state=True, beta=0.7)
ZERO = replace(SHORT, name="zero_steps", T=64, decay="none", beta=0.0)
SEGMENTS = replace(SHORT, name="segments", T=200)


def assert_right(x: DeltaRuleInputs, *answers: dict[str, Tensor]) -> None:
    """Each of the answers within the rounding of the reference."""
    exact = results_and_gradients(delta_rule, x.double(), backend="chunkwise")
    plain = results_and_gradients(delta_rule, x, backend="chunkwise")
    for found in answers:
        expected, rounded = ({name: reference[name] for name in found} for reference in (exact, plain))
        assert_within_reference(found, expected, rounded, x, rounding=x.q.dtype, floor=4.0)


def judge(
    case: DeltaRuleCase, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, kernels: set[str],
    change: Callable[[DeltaRuleInputs], None] = lambda _: None, recorded: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """Right, the same bits at any timing, no hazard, and by these kernels."""
    x, model = case.make(dtype=dtype), Model()
    change(x)
    found = []
    for model.timing in (Timing(late=True, first=0), Timing(late=False, first=2)):
        found.append(results(x, case.K**-0.5, model, monkeypatch, recorded))
    assert_right(x, found[0])
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
    assert not model.hazards, model.hazards
    assert kernels <= set(model.names), model.names
    return found[0]


def test_step_sizes_of_zero_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judge(ZERO, torch.bfloat16, monkeypatch, {"hopper_scan_kernel", "backward_kernel", "tiny_steps_kernel"})
    assert not found["d_k"].any() and not found["d_v"].any()


def cut_segments(case: DeltaRuleCase, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.name.startswith("segments"):
        monkeypatch.setattr(plan, "segments_of", lambda chunks, programs: (-(-chunks // 2), 2))


def some_zero_and_large(x: DeltaRuleInputs) -> None:
    x.beta[:, ::5] = 0
    x.beta[0, 70, 0] = 1.9  # in the second chunk


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(SHORT, marks=pytest.mark.slow),
        pytest.param(
            replace(SHORT, name="whole_chunks", T=128, decay="none", initial_state=False), marks=pytest.mark.slow
        ),
        pytest.param(replace(SHORT, name="channel", decay="channel"), marks=pytest.mark.sweep),
        pytest.param(replace(SHORT, name="erase_key", T=100, erase="gated"), marks=pytest.mark.sweep),
        pytest.param(SEGMENTS, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_gradients_with_a_second_scan_are_the_same(case: DeltaRuleCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, but for what the fused forward pass, which rounds otherwise, makes in one of both."""
    fused, channel = case.name in ("short", "whole_chunks"), case.decay == "channel"
    cut_segments(case, monkeypatch)
    x, scans = case.make(dtype=torch.bfloat16), []
    some_zero_and_large(x)
    found = []
    for keep in (True, False):
        model = Model()
        found.append(results(x, case.K**-0.5, model, monkeypatch, keep=keep))
        assert {"backward_kernel", "hopper_reverse_scan_kernel"} & set(model.names)
        assert ("hopper_forward_kernel" in model.names) == (fused and keep or channel and not keep)
        scans.append(model.names.count("hopper_scan_kernel"))
    assert_right(x, *found)
    if not fused:
        same = [name for name in found[0] if name.startswith("d_") or not channel]
        assert all(torch.equal(found[0][name], found[1][name]) for name in same)
    # Of two launches one is for chunks with large gains; the fused forward pass spares the other.
    assert scans[1] == scans[0] + 2 + fused


IN_PLACE = replace(SHORT, name="in_place", T=192, decay="channel")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(IN_PLACE, marks=pytest.mark.slow),
        pytest.param(replace(IN_PLACE, name="segments", T=256), marks=pytest.mark.sweep),
        pytest.param(replace(IN_PLACE, name="groups", groups=2, log_decay="uneven"), marks=pytest.mark.sweep),
        pytest.param(replace(IN_PLACE, name="strong", log_decay=-50.0, initial_state=False), marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_gradients_in_place_are_the_same(case: DeltaRuleCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, at any timing: gradients of states in the memory of queries and keys, and what follows in theirs."""
    monkeypatch.setattr(plan, "FEW_SCANS", 0)  # one program per head
    cut_segments(case, monkeypatch)
    x, model = case.make(dtype=torch.bfloat16), Model()
    some_zero_and_large(x)  # the second chunk is strict
    expected = results(x, case.K**-0.5, model, monkeypatch, in_place=False)
    others = dict(model.hazards)  # scans of segments read padding of what Triton hands to their warps
    for model.timing in (Timing(late=True, first=0), Timing(late=False, first=2)):
        found = results(x, case.K**-0.5, model, monkeypatch)
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert_right(x, expected)
    assert model.hazards == others and (not others or case.name == "segments"), model.hazards
    assert any(dict(named).get("IN_PLACE") for _, named, _ in model.programs)


MANY = [
    *((replace(SHORT, name=f"{decay}-{d}", decay=decay), d) for decay in ("none", "scalar", "channel")
      for d in (torch.bfloat16, torch.float16)),
    *((replace(SEGMENTS, name=f"segments-{decay}", decay=decay), torch.bfloat16) for decay in ("none", "scalar")),
    (replace(SHORT, name="fresh", initial_state=False, T=100), torch.bfloat16),
    (replace(SHORT, name="strong", log_decay=-50.0), torch.bfloat16),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    [
        SHORT,
        replace(SHORT, name="fresh", decay="none", initial_state=False),
        replace(SHORT, name="channel", decay="channel"),
        replace(SHORT, name="channel-uneven", decay="channel", log_decay="uneven", H=2, T=200, initial_state=False),
        replace(SHORT, name="channel-strong", decay="channel", log_decay=-2.0),  # about half a RANGE beyond one
        SEGMENTS,
        replace(SEGMENTS, name="segments-fresh", decay="none", initial_state=False, H=2, T=300),
    ],
    ids=str,
)
def test_fused_forward_pass(case: DeltaRuleCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.Plan, "neighbours", 4)  # several chunks per program that looks for what is left
    cut_segments(case, monkeypatch)
    channel = case.decay == "channel"
    rest = {"prepare_channel_rest_kernel", "invert_kernel"} if channel else {"prepare_rest_kernel"}
    kernels = {"hopper_forward_kernel", "hopper_scan_kernel"} | rest
    judge(case, torch.bfloat16, monkeypatch, kernels, some_zero_and_large, recorded=False)


@pytest.mark.sweep
@pytest.mark.parametrize(("case", "dtype"), MANY, ids=[case.name for case, _ in MANY])
def test_many_cases(case: DeltaRuleCase, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_segments(case, monkeypatch)
    judge(case, dtype, monkeypatch, set(), some_zero_and_large)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    [replace(SHORT, name="two_heads", H=2), replace(SHORT, name="fresh", decay="none", initial_state=False, T=128)],
    ids=str,
)
def test_recorded_forward_pass(case: DeltaRuleCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large gain in one head."""
    monkeypatch.setattr(plan.Plan, "neighbours", 4)
    kernels = {"hopper_forward_kernel", "prepare_rest_kernel", "hopper_scan_kernel", "backward_kernel"}
    judge(case, torch.bfloat16, monkeypatch, kernels, some_zero_and_large)


def without(operation: str) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        for i, (predicate, name, operands, text) in enumerate(program.code):
            if name.startswith(operation):
                program.code[i] = predicate, ".nothing", operands, text

    return change


@pytest.mark.sweep
@pytest.mark.parametrize("operation", ["fence.proxy", "mbarrier.wait", "cp.async.bulk.wait_group"])
def test_what_is_left_out_is_noticed(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fences and waits: without them the model finds a hazard, a wrong number or too many arrivals."""
    x = replace(SHORT, name="left_out", T=128, decay="none").make(dtype=torch.bfloat16)
    right = results(x, 0.1, Model(), monkeypatch)
    model, noticed = Model(without(operation)), False
    for model.timing in (Timing(late=True, first=0), Timing(late=False, first=2)):
        try:
            found = results(x, 0.1, model, monkeypatch)
        except AssertionError:
            noticed = True
        else:
            noticed |= bool(model.hazards) or not all(torch.equal(right[name], found[name]) for name in right)
    assert noticed
