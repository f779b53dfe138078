"""The benchmark run on a CPU: which rows come out, and that a candidate that fails loses only its own rows."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from bench_fakes import FakeTimer

from benchmarks import operator_suite
from benchmarks.inputs import make_inputs
from benchmarks.operator_candidates import candidates_for, has_peer, step_candidates
from benchmarks.operator_options import GATES, OPERATORS, UNEVEN, gates_of, parse_peers
from benchmarks.operator_results import OperatorResults
from benchmarks.operator_suite import DeviceLost, Plan, bench_ops
from benchmarks.shapes import Shape
from benchmarks.warm_up import warm_up_commands, warm_up_peers
from deltazoo.ops import delta_rule, linear_attention

SHAPE = Shape(1, 40, 2, 16, 8)
TIMED = {
    "first_forward_s", "forward_ms", "forward_graph_ms", "host_forward_us", "host_forward_grad_us",
    "first_training_s", "forward_backward_ms", "forward_backward_graph_ms", "peak_mib",
}  # fmt: skip


@pytest.fixture
def plan() -> Plan:
    return Plan(
        shapes=[SHAPE],
        ops=["delta", "kda", "softmax"],
        gates=["medium"],
        groups=["forward", "training", "graphs", "memory", "host"],
        peers=["sdpa"],
        backend="chunkwise",
        device="cpu",
    )


def run(plan: Plan, out: Path, **options: object) -> OperatorResults:
    return bench_ops(plan, out, **{"timer": FakeTimer(), "report": lambda line: None, **options})


def measures(results: OperatorResults, op: str, library: str) -> set[str]:
    return {row.measure for row in results.rows.values() if (row.op, row.library) == (op, library)}


@pytest.fixture
def installed_fla(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A stand-in for flash-linear-attention that runs forward and refuses to train; counts its calls."""
    calls = {"chunk_kda": 0}

    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return v.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("wrong results on this compiler\nsecond line")

    def chunk(q, k, v, beta, g=None):
        calls["chunk_kda"] += g is not None
        return Refuses.apply(q, k, v), None

    names = {
        "fla.ops.delta_rule": {"chunk_delta_rule": chunk},
        "fla.ops.kda": {"chunk_kda": chunk},
    }
    for name, content in names.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return calls


def test_every_measure_of_every_candidate_is_saved(plan: Plan, tmp_path: Path) -> None:
    results = run(plan, tmp_path / "run.json")
    for op, library in (("delta", "deltazoo chunkwise"), ("kda", "deltazoo chunkwise"), ("softmax", "sdpa")):
        assert measures(results, op, library) == TIMED
    assert all(row.value is not None and row.error is None for row in results.rows.values())
    row = results.find(SHAPE, "delta", "none", "deltazoo chunkwise", "forward_ms")
    assert (row.value, row.low, row.high, row.samples) == (1.0, 0.5, 1.5, 7)
    assert OperatorResults.load([tmp_path / "run.json"]) == results


def test_groups_choose_what_is_measured(plan: Plan, tmp_path: Path) -> None:
    results = run(replace(plan, ops=["delta"], groups=["forward"]), tmp_path / "run.json")
    assert measures(results, "delta", "deltazoo chunkwise") == {"first_forward_s", "forward_ms"}
    results = run(replace(plan, ops=["delta"], groups=["memory"]), tmp_path / "other.json")
    assert measures(results, "delta", "deltazoo chunkwise") == {"first_training_s", "peak_mib"}


def test_a_peer_that_refuses_to_train_keeps_its_forward_times(
    plan: Plan, tmp_path: Path, installed_fla: dict[str, int]
) -> None:
    results = run(replace(plan, peers=["fla"], ops=["kda"]), tmp_path / "run.json")
    rows = {row.measure: row for row in results.rows.values() if row.library == "fla"}
    assert rows.keys() == TIMED
    refused = {"first_training_s", "forward_backward_ms", "forward_backward_graph_ms", "peak_mib"}
    assert {name for name, row in rows.items() if row.error} == refused
    assert rows["forward_backward_ms"].error == "RuntimeError: wrong results on this compiler"
    assert rows["forward_backward_ms"].value is None and rows["forward_backward_ms"].samples == 0
    assert installed_fla["chunk_kda"] > 0
    assert all(row.error is None for row in results.rows.values() if row.library != "fla")


def test_a_peer_that_is_not_installed_is_named_and_left_out(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    lines: list[str] = []
    results = run(replace(plan, peers=["fla", "sdpa"]), tmp_path / "run.json", report=lines.append)
    assert lines[0].startswith("fla: not measured")
    assert {row.library for row in results.rows.values()} == {"deltazoo chunkwise", "sdpa"}
    [recorded] = results.runs.values()
    assert set(recorded.missing_peers) == {"fla"}


def test_a_later_run_replaces_its_rows_and_keeps_the_others(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    first = run(replace(plan, ops=["delta", "softmax"]), out)
    [first_run] = first.runs
    second = run(replace(plan, ops=["delta"]), out, commit="abc")
    assert second.find(SHAPE, "softmax", "none", "sdpa", "forward_ms").run == first_run
    newer = second.runs[second.find(SHAPE, "delta", "none", "deltazoo chunkwise", "forward_ms").run]
    assert newer.commit == "abc" and len(second.runs) == 2


def test_resume_measures_only_what_is_missing(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    run(replace(plan, ops=["delta"]), out)
    lines: list[str] = []
    run(plan, out, resume=True, report=lines.append)
    assert [line.split()[1] for line in lines] == ["kda", "softmax"]


def test_a_lost_device_ends_the_run_after_saving(plan: Plan, tmp_path: Path, installed_fla: dict[str, int]) -> None:
    out = tmp_path / "run.json"
    waits = FakeTimer()
    run(replace(plan, ops=["delta"], peers=[]), tmp_path / "count.json", timer=waits)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        run(replace(plan, ops=["delta", "kda"], peers=["fla"]), out, timer=FakeTimer(waits.waits + 1))
    saved = OperatorResults.load([out])
    assert measures(saved, "delta", "deltazoo chunkwise") == TIMED
    assert saved.find(SHAPE, "delta", "none", "fla", "forward_backward_ms").error is not None
    assert not measures(saved, "kda", "fla")


def test_inputs_that_do_not_fit_are_a_row_not_an_end(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(shape: Shape, op: str, gates: str, **options: object) -> object:
        if op == "delta":
            raise torch.OutOfMemoryError("out of memory")
        return make_inputs(shape, op, gates, **options)

    monkeypatch.setattr(operator_suite, "make_inputs", make)
    results = run(plan, tmp_path / "run.json")
    assert results.find(SHAPE, "delta", "none", "deltazoo chunkwise", "forward_ms").error.startswith("OutOfMemory")
    assert measures(results, "softmax", "sdpa") == TIMED


def test_warming_up_saves_nothing(plan: Plan, tmp_path: Path) -> None:
    lines: list[str] = []
    run(replace(plan, ops=["delta"], warm_up_only=True), tmp_path / "run.json", report=lines.append)
    assert not (tmp_path / "run.json").exists() and len(lines) == 1 and "fwd" not in lines[0]


def test_ours_can_stay_out(plan: Plan) -> None:
    assert [c.library for *_, c in replace(plan, ours=False).candidates()] == ["sdpa"]


def test_one_operator_is_timed_in_one_go(plan: Plan, installed_fla: dict[str, int]) -> None:
    both = replace(plan, peers=["fla"], ops=["delta", "kda"], gates=["weak", "strong"])
    assert [(op, gates, c.library) for _, op, gates, c in both.candidates()] == [
        (op, gates, library)
        for op, gates in (("delta", "none"), ("kda", "weak"), ("kda", "strong"))
        for library in ("deltazoo chunkwise", "fla")
    ]


@pytest.fixture
def installed_gdn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Stand-ins for flash-linear-attention's gdn and for FlashQLA; lists the library called, and what it reads."""
    calls: list[tuple[str, str, str]] = []

    def switches() -> tuple[str, str]:
        return os.environ.get("FLA_TILELANG", "unset"), os.environ.get("FLA_FLASH_QLA", "unset")

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v, q, library):
            ctx.library, ctx.size = library, q.shape
            calls.append((library, *switches()))
            return q.mean() * v

        @staticmethod
        def backward(ctx, gradient):
            calls.append((f"{ctx.library} backward", *switches()))
            return gradient, gradient.new_zeros(ctx.size), None

    def chunk(library: str) -> object:
        # The arguments that flash-linear-attention 0.6 and FlashQLA 0.1.3 have in common, and no others.
        def chunk_gated_delta_rule(
            q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
            cu_seqlens=None,
        ):  # fmt: skip
            assert g.dtype == beta.dtype == torch.float32 and g.shape == beta.shape == v.shape[:3]
            return Scaled.apply(v + 0 * (g + beta)[..., None] + 0 * k.mean(), q, library), None

        return chunk_gated_delta_rule

    for name in ("fla", "fla.ops", "fla.ops.delta_rule", "fla.ops.gated_delta_rule", "flash_qla", "tilelang"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = chunk("fla")
    sys.modules["flash_qla"].chunk_gated_delta_rule = chunk("flash_qla")
    for variable in ("FLA_TILELANG", "FLA_FLASH_QLA"):
        monkeypatch.setenv(variable, "unset")
    return calls


def test_fla_runs_on_the_kernels_that_a_peers_name_says(
    plan: Plan, tmp_path: Path, installed_gdn: list[tuple[str, str, str]]
) -> None:
    peers = ["flashqla", "fla", "fla-tilelang", "fla-flashqla"]
    results = run(replace(plan, ops=["gdn"], peers=peers, ours=False, groups=["training"]), tmp_path / "run.json")
    assert {row.library for row in results.rows.values()} == set(peers)
    assert not [row.error for row in results.rows.values() if row.error]
    assert set(installed_gdn) == {
        (library + part, *switches)
        for library, *switches in (
            ("flash_qla", "unset", "unset"), ("fla", "0", "0"), ("fla", "1", "0"), ("fla", "0", "1")
        )
        for part in ("", " backward")
    }  # fmt: skip


def test_operators_of_peers_that_have_few() -> None:
    few = ("fla-safe-gate", "fla-tilelang", "fla-flashqla", "flashqla", "sdpa")
    peers_of = {op: [peer for peer in few if has_peer(op, peer)] for op in OPERATORS}
    assert peers_of["gdn"] == ["fla-tilelang", "fla-flashqla", "flashqla"]
    assert peers_of["kda"] == ["fla-safe-gate", "fla-tilelang"] and peers_of["delta"] == []
    assert has_peer("delta", "fla") and not has_peer("gdn-erase", "fla")


def test_unknown_peers_are_refused() -> None:
    assert parse_peers("none") == []
    with pytest.raises(ValueError, match="did you mean 'fla'"):
        parse_peers("flaa")


@pytest.mark.parametrize("op", ["gdn", "kda"])
@pytest.mark.parametrize("gates", GATES)
def test_gates_have_the_stated_mean_and_bound(op: str, gates: str) -> None:
    inputs = make_inputs(Shape(1, 4096, 4, 8, 8), op, gates, device="cpu")
    assert inputs.log_decay.dtype == torch.float32 and inputs.log_decay.ndim == {"gdn": 3, "kda": 4}[op]
    assert inputs.log_decay.mean().item() == pytest.approx(GATES[gates], rel=0.03)
    assert 2 * GATES[gates] <= inputs.log_decay.min() and inputs.log_decay.max() <= 0


def test_uneven_gates_go_from_channel_to_channel() -> None:
    means = make_inputs(Shape(1, 4096, 2, 64, 8), "kda", "uneven", device="cpu").log_decay.mean((0, 1))
    assert torch.allclose(means[:, 0], torch.tensor(UNEVEN[0]), rtol=0.1)
    assert torch.allclose(means[:, -1], torch.tensor(UNEVEN[1]), rtol=0.1)
    assert torch.allclose(means[:, 1:] / means[:, :-1], torch.tensor(5000 ** (1 / 63)), rtol=0.1)


def test_inputs_are_what_the_page_says() -> None:
    assert gates_of("delta") == gates_of("softmax") == ["none"]
    inputs = make_inputs(SHAPE, "delta", "none", device="cpu")
    assert inputs.log_decay is None and inputs.q.dtype == inputs.d_output.dtype == torch.bfloat16
    assert inputs.k.float().norm(dim=-1).sub(1).abs().max() < 0.01
    assert inputs.beta.min() > 0 and inputs.beta.max() < 1
    assert len(inputs.leaves("delta")) == 4 and len(inputs.leaves("softmax")) == 3


def test_warming_up_takes_one_process_for_what_compiles_the_same() -> None:
    shapes = [Shape(8, 4096, 16, 128, 128), Shape(4, 2048, 16, 128, 128), Shape(1, 32768, 16, 128, 128)]
    peers = ["fla", "fla-safe-gate", "fla-flashqla", "flashqla", "sdpa"]
    commands = warm_up_commands(shapes, ["delta", "kda", "softmax"], peers, "cuda")
    picked = [[command[command.index(flag) + 1] for flag in ("--shapes", "--ops", "--peers")] for command in commands]
    assert picked == [
        [shape, *rest]
        for rest in (("delta", "fla"), ("kda", "fla"), ("kda", "fla-safe-gate"))
        for shape in ("2x1024x16x128x128", "1x1024x16x128x128")
    ]
    commands = warm_up_commands(shapes, ["gdn"], ["flashqla"], "cuda")
    assert [command[command.index("--shapes") + 1] for command in commands] == [str(shape) for shape in shapes]


def test_a_warm_up_that_fails_is_reported() -> None:
    lines: list[str] = []
    failing = [sys.executable, "-c", "raise SystemExit('no compiler')"]
    asks_for_no_tuning_results = [sys.executable, "-c", "import os; print(os.environ['FLA_CACHE_RESULTS'])"]
    warm_up_peers([failing, asks_for_no_tuning_results], 1, lines.append)
    assert sorted(lines) == ["warmed up  0", "warmed up  status 1 no compiler"]


def test_every_operator_has_inputs_of_its_own_and_gradients_for_all_of_them() -> None:
    for op, operator in OPERATORS.items():
        gates = "medium" if "medium" in gates_of(op) else "none"
        inputs = make_inputs(SHAPE, op, gates, device="cpu", dtype=torch.float32)
        [ours] = candidates_for(op, backend="chunkwise", precisions=[None], peers=["sdpa"])
        output = ours.forward(inputs)
        assert output.shape == (SHAPE.B, SHAPE.T, SHAPE.H, SHAPE.V)
        gradients = ours.train_step(inputs)
        assert len(gradients) == len(inputs.leaves(op)) and all(x.abs().max() > 0 for x in gradients), op
        arguments = dict(q=inputs.q, k=inputs.k, v=inputs.v, log_decay=inputs.log_decay, backend="reference")
        if not operator.corrects:
            expected = linear_attention(**arguments)
        else:
            erase_key = inputs.erase_key
            if operator.gated:
                erase_key, arguments["v"] = inputs.erase_gate * inputs.k, inputs.write_gate * inputs.v
            arguments |= dict(beta=inputs.beta, erase_key=erase_key, num_micro_steps=operator.num_micro_steps)
            expected = delta_rule(**arguments, erase_reads="undecayed" if operator.undecayed else "decayed")
        torch.testing.assert_close(output, expected.output, msg=op)
        one = make_inputs(replace(SHAPE, T=1), op, gates, device="cpu", dtype=torch.float32)
        [step] = step_candidates(op, backend="chunkwise", peers=[]).values()
        with torch.no_grad():
            assert step(one, torch.zeros(SHAPE.B, SHAPE.H, SHAPE.K, SHAPE.V)).output.shape == (SHAPE.B, 1, 2, SHAPE.V)


@pytest.mark.parametrize(
    ("op", "module", "name", "expected"),
    [
        ("comba", "comba", "chunk_comba", {"beta", "g", "p"}),
        ("gdn2", "gdn2", "chunk_gdn2", {"g", "b", "w"}),
        ("gdn-n2", "gated_delta_product", "chunk_gated_delta_product", {"beta", "g", "num_householder"}),
        ("delta-n4", "gated_delta_product", "chunk_gated_delta_product", {"beta", "g", "num_householder"}),
        ("gla", "gla", "chunk_gla", {"g"}),
        ("lightning", "lightning_attn", "chunk_lightning_attn", {"layer_idx", "num_layers"}),
    ],
)
def test_peers_get_the_arguments_that_they_take(
    op: str, module: str, name: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = ModuleType(f"fla.ops.{module}")
    content.__dict__[name] = lambda **arguments: (arguments, None)
    monkeypatch.setitem(sys.modules, f"fla.ops.{module}", content)
    for parent in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    [peer] = candidates_for(op, backend="chunkwise", precisions=[], peers=["fla"])
    inputs = make_inputs(SHAPE, op, "medium" if "medium" in gates_of(op) else "none", device="cpu")
    given = peer.forward(inputs)
    assert given.keys() == {"q", "k", "v"} | expected
    assert given["k"].shape[1] == given.get("num_householder", 1) * given["q"].shape[1]
