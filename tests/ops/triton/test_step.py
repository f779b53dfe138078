"""The step kernel against the token loop: through Triton's interpreter on a CPU, and compiled on a GPU.

The interpreter has to be chosen before Triton is imported, so one child process computes every case and the tests here
judge what it found. `python test_step.py FILE` is that child.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from delta_rule_cases import DeltaRuleCase, DeltaRuleInputs
from fresh_process import run_interpreted
from helpers import assert_within_reference
from torch import Tensor

from deltazoo.ops.call import RuleCall
from deltazoo.ops.reference import recurrent_loop

pytest.importorskip("triton")

from deltazoo.ops.triton import step  # noqa: E402

SCALE = 0.37


@dataclass(frozen=True)
class StepCase:
    """One call: the numbers, their dtype, and how they are handed over."""

    case: DeltaRuleCase
    dtype: torch.dtype = torch.float32
    beta: bool = True
    inplace: bool = False
    strided: bool = False  # q, k and v as views of one projection, gates with the head axis not last in memory

    def __str__(self) -> str:
        flags = [name for name in ("inplace", "strided") if getattr(self, name)] + ["no_beta"] * (not self.beta)
        return "-".join([self.case.name, str(self.dtype).removeprefix("torch."), *flags])

    def inputs(self, device: str) -> DeltaRuleInputs:
        return self.case.make(device=device, dtype=self.dtype)


def token(name: str, **options: object) -> DeltaRuleCase:
    return DeltaRuleCase(name, **{"T": 1, "initial_state": True, **options})  # type: ignore[arg-type]


CASES = [
    *(
        StepCase(token(f"{decay}", decay=decay, K=32, V=40), dtype, beta)
        for decay in ("none", "scalar", "channel")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for beta in (True, False)
    ),
    StepCase(token("k1_v1", B=1, H=1, K=1, V=1)),
    StepCase(token("k20_v33_grouped4", H=3, groups=4, K=20, V=33, decay="channel")),
    StepCase(token("k96_v192", B=1, H=1, K=96, V=192, decay="scalar"), torch.bfloat16),
    StepCase(token("k256_v512", B=1, H=1, K=256, V=512, decay="channel"), torch.bfloat16),
    StepCase(token("k128_grouped2", B=3, H=1, groups=2, K=128, V=128, decay="scalar"), torch.bfloat16, inplace=True),
    StepCase(token("inplace", groups=2, decay="channel"), inplace=True),
    StepCase(token("strided", groups=2, decay="channel", H=3), torch.bfloat16, strided=True),
    StepCase(token("strided_scalar", decay="scalar", H=3), strided=True, inplace=True),
    StepCase(token("reset_scalar", B=4, decay="scalar", log_decay="reset")),
    StepCase(token("reset_channel", B=4, decay="channel", log_decay="reset")),
    StepCase(token("reset_no_beta", B=4, decay="channel", log_decay="reset"), beta=False),
    StepCase(token("decay_50", decay="scalar", log_decay=-50.0)),
    StepCase(token("zero_keys", keys="zero", decay="scalar")),
    StepCase(token("beta_2", beta=2.0), torch.bfloat16),
    StepCase(token("beta_0", beta=0.0, decay="channel")),
    *(
        StepCase(
            token(
                f"{decay}_{reads}_{n}_steps",
                groups=2,
                K=20,
                V=33,
                decay=decay,
                erase=erase,
                beta=0.5,
                erase_reads=reads,
                num_micro_steps=n,
            ),
            dtype,
            inplace=n == 2,
            strided=n == 3,
        )
        for decay, reads in (
            ("none", "decayed"),
            ("scalar", "decayed"),
            ("scalar", "undecayed"),
            ("channel", "undecayed"),
        )
        for n, erase, dtype in (
            (1, "free", torch.float32),
            (2, "gated", torch.bfloat16),
            (2, "tied", torch.float32),
            (3, "free", torch.float32),
        )
    ),
    StepCase(token("reset_undecayed", B=4, decay="channel", log_decay="reset", erase="gated", erase_reads="undecayed")),
]


def strided(x: Tensor) -> Tensor:
    """The same numbers as a view into something wider: no axis but the last contiguous."""
    wide = x.new_full((*x.shape[:2], x.shape[2] + 1, 2 * x.shape[3] + 3), float("nan"))
    wide[:, :, :-1, : x.shape[3]] = x
    return wide[:, :, :-1, : x.shape[3]]


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def undecayed(x: DeltaRuleInputs) -> bool:
    """As calls say it: without a decay both reads are the same."""
    return x.erase_reads == "undecayed" and x.log_decay is not None


def step_of(*tensors: Tensor | None, inplace: bool = False) -> tuple[Tensor, Tensor]:
    """A step of q, k, v, beta and log_decay from a state."""
    *inputs, state = tensors
    return step.recurrent_step(RuleCall(*inputs, SCALE, state, None), inplace=inplace)  # type: ignore[arg-type]


def run(case: StepCase, device: str) -> dict[str, Tensor]:
    """What the kernel makes of a case. Also checks that a state is written if and only if that was asked for."""
    x = case.inputs(device)
    q, k, v, beta, log_decay = x.q, x.k, x.v, x.beta if case.beta else None, x.log_decay
    if case.strided:
        q, k, v = strided(q), strided(k), strided(v)
        beta, log_decay = (None if gate is None else heads_first(gate) for gate in (beta, log_decay))
    state = x.initial_state
    assert state is not None
    before = state.clone()
    update = (x.erase_key, undecayed(x), x.num_micro_steps)
    call = RuleCall(q, k, v, beta, log_decay, SCALE, state, None, None, *update)
    output, new_state = step.recurrent_step(call, inplace=case.inplace)
    assert (new_state.data_ptr() == state.data_ptr()) is case.inplace
    assert case.inplace or torch.equal(state, before)
    assert output.dtype == v.dtype and output.is_contiguous() and new_state.dtype == torch.float32
    return {"output": output.cpu(), "final_state": new_state.cpu()}


def loop(case: StepCase, inputs: DeltaRuleInputs) -> dict[str, Tensor]:
    x = inputs
    beta = x.beta if case.beta else None
    update = (x.erase_key, undecayed(x), x.num_micro_steps)
    call = RuleCall(x.q, x.k, x.v, beta, x.log_decay, SCALE, x.initial_state, None, None, *update)
    output, state = recurrent_loop(call)
    return {"output": output, "final_state": state}


def judge(case: StepCase, actual: dict[str, Tensor]) -> None:
    inputs = case.inputs("cpu")
    assert_within_reference(actual, loop(case, inputs.double()), loop(case, inputs), inputs)


def operator_checks(device: str) -> None:
    """Schema, fake tensors, and the same bits under torch.compile, for both forms of the operator."""
    x = CASES[1].case.make(device=device, dtype=torch.bfloat16)
    tensors = (x.q, x.k, x.v, x.beta, x.log_decay, x.initial_state)
    for operator in (torch.ops.deltazoo.recurrent_step.default, torch.ops.deltazoo.recurrent_step_.default):
        torch.library.opcheck(operator, tuple(RuleCall(*tensors[:5], SCALE, tensors[5], None)))

    for inplace in (False, True):
        called = partial(step_of, inplace=inplace)
        expected = called(*(None if t is None else t.clone() for t in tensors))
        compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
        actual = compiled(*(None if t is None else t.clone() for t in tensors))
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def resets_are_exact(device: str) -> None:
    """log_decay = -inf leaves nothing of the state: not a NaN, not a rounding error."""
    x = token("reset", B=1, decay="scalar").make(device=device, dtype=torch.float32)
    for shape in [(1, 1, 2), (1, 1, 2, 16)]:
        forget = torch.full(shape, -torch.inf, device=device)
        huge = torch.full((1, 2, 16, 24), 1e30, device=device)
        output, state = step_of(x.q, x.k, x.v, x.beta, forget, huge)
        fresh = step_of(x.q, x.k, x.v, x.beta, None, torch.zeros_like(huge))
        assert torch.equal(output, fresh[0]) and torch.equal(state, fresh[1])
        output, state = step_of(x.q, torch.zeros_like(x.k), x.v, x.beta, forget, huge)
        assert not output.any() and not state.any()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor] | str]:
    """Results of every case, or the error it ended with, computed by Triton's interpreter in a child process."""
    path = tmp_path_factory.mktemp("interpreted") / "results.pt"
    run_interpreted(Path(__file__), path)
    return torch.load(path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_kernel_agrees_with_the_loop(
    case: StepCase, interpreted: dict[str, dict[str, Tensor] | str]
) -> None:
    result = interpreted[str(case)]
    assert isinstance(result, dict), result
    judge(case, result)


@pytest.mark.parametrize("check", ["operator_checks", "resets_are_exact"])
def test_interpreted_operator(check: str, interpreted: dict[str, dict[str, Tensor] | str]) -> None:
    assert interpreted[check] == "passed", interpreted[check]


@pytest.mark.parametrize("unfit", [lambda s: s.bfloat16(), lambda s: s.mT.contiguous().mT], ids=["bfloat16", "strided"])
def test_only_a_contiguous_float32_state_is_updated_in_place(unfit) -> None:
    x = token("state").make(dtype=torch.float32)
    with pytest.raises(ValueError, match="contiguous and float32"):
        step_of(x.q, x.k, x.v, x.beta, None, unfit(x.initial_state), inplace=True)


@pytest.mark.parametrize(("K", "dtype", "message"), [(257, torch.float32, "257"), (16, torch.float64, "float64")])
def test_what_the_kernel_cannot_do_is_refused(K: int, dtype: torch.dtype, message: str) -> None:
    x = token("too_much", K=K).make(dtype=dtype)
    with pytest.raises(NotImplementedError, match=message):
        step_of(x.q, x.k, x.v, x.beta, None, x.initial_state)


def test_tiles_are_never_thinner_than_their_threads() -> None:
    """A tile with fewer elements than threads would be computed twice, and read while its twin writes it in place."""
    for K in range(1, step.MAX_KEY_DIM + 1):
        for V in (*range(1, 65), 96, 128, 192, 256, 512):
            columns, warps = step.choose_tile(K, V)
            rows = 2 ** (K - 1).bit_length()
            assert columns & (columns - 1) == 0 and columns < 2 * V
            assert warps == 1 or rows * columns >= 2048 * warps
            assert rows * columns <= 4096 * warps


def bits(tensors: tuple[Tensor, ...]) -> list[bytes]:
    return [t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_kernel_agrees_with_the_loop(case: StepCase) -> None:
    judge(case, run(case, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (256, 256), (256, 512), (96, 192)])
def test_full_sizes(K: int, V: int, decay: str) -> None:
    case = StepCase(token("full", B=4, H=16, groups=2, K=K, V=V, decay=decay), torch.bfloat16, inplace=True)
    judge(case, run(case, "cuda"))


@pytest.mark.gpu
def test_operator_on_a_gpu() -> None:
    operator_checks("cuda")
    resets_are_exact("cuda")


@pytest.mark.gpu
def test_same_bits_from_run_to_run() -> None:
    x = token("bits", B=8, H=16, K=128, V=128, decay="scalar").make(device="cuda", dtype=torch.bfloat16)
    runs = [step_of(x.q, x.k, x.v, x.beta, x.log_decay, x.initial_state) for _ in range(5)]
    assert all(bits(r) == bits(runs[0]) for r in runs)


@pytest.mark.gpu
def test_cuda_graph_with_a_static_state() -> None:
    """Three replays of a captured step in place are three steps."""
    x = token("graph", H=3, groups=2, K=64, V=64, decay="scalar").make(device="cuda", dtype=torch.bfloat16)
    state = x.initial_state.clone()
    arguments = (x.q, x.k, x.v, x.beta, x.log_decay)
    step_of(*arguments, state, inplace=True)  # compiles
    state.copy_(x.initial_state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _ = step_of(*arguments, state, inplace=True)
    for _ in range(3):
        graph.replay()
    expected_state = x.initial_state
    for _ in range(3):
        expected_output, expected_state = step_of(*arguments, expected_state)
    assert bits((output, state)) == bits((expected_output, expected_state))


@pytest.mark.gpu
def test_states_beyond_32_bit_offsets() -> None:
    """The last of 2**31 + elements of state is updated like the first."""
    B, H, K, V = 1032, 16, 256, 512
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free GPU memory")
    x = token("wide", B=1, H=H, K=K, V=V, decay="scalar").make(device="cuda", dtype=torch.bfloat16)
    state = x.initial_state.expand(B, -1, -1, -1).contiguous()
    assert state.numel() > 2**31
    q, k, v, beta, log_decay = (t.expand(B, *t.shape[1:]) for t in (x.q, x.k, x.v, x.beta, x.log_decay))
    output, _ = step_of(q, k, v, beta, log_decay, state, inplace=True)
    assert torch.equal(output[0], output[-1]) and torch.equal(state[0], state[-1])
    assert not torch.equal(state[-1], x.initial_state[0])


def main(path: str) -> None:
    torch.set_num_threads(1)
    results: dict[str, dict[str, Tensor] | str] = {}
    for case in CASES:
        try:
            results[str(case)] = run(case, "cpu")
        except Exception as error:
            results[str(case)] = f"{type(error).__name__}: {error}"
    for check in (operator_checks, resets_are_exact):
        try:
            check("cpu")
            results[check.__name__] = "passed"
        except Exception as error:
            results[check.__name__] = f"{type(error).__name__}: {error}"
    torch.save(results, path)


if __name__ == "__main__":
    main(sys.argv[1])
