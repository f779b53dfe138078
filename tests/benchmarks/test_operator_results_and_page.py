"""Result files are read strictly and merged by date; the page says for every target whether it was met."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from bench_fakes import FakeTimer
from benchmarks.operator_page import render_page, write_page
from benchmarks.targets import TARGETS, verdict

from benchmarks.operator_results import OperatorResults, OperatorRow
from benchmarks.operator_suite import Plan, bench_ops
from benchmarks.provenance import Run, describe_run
from benchmarks.shapes import SWEEP, TABLE, Shape
from benchmarks.timing import CpuTimer, Spread, timer_for

ROOT = Path(__file__).resolve().parents[2]
TRAIN, NARROW, SMALL = (str(TABLE[name]) for name in ("train", "narrow", "small"))


def some_run(id: str = "one", date: str = "2026-01-02T03:04:05.000000+00:00") -> Run:
    run = describe_run(device="cpu", commit="0123456789abcdef", command=["bench", "ops"])
    return replace(run, id=id, date=date, gpu="NVIDIA H200", copy_tb_s=4.3, matmul_tflop_s=790.0)


@pytest.fixture
def results() -> OperatorResults:
    one = OperatorResults({"one": some_run()})
    rows = [
        (TRAIN, "gdn", "medium", "deltazoo", "forward_ms", 0.30),
        (TRAIN, "gdn", "medium", "fla", "forward_ms", 0.90),
        (TRAIN, "gdn", "medium", "deltazoo", "forward_backward_ms", 1.54),
        (TRAIN, "softmax", "none", "sdpa", "forward_ms", 1.02),
        (NARROW, "delta", "none", "deltazoo", "forward_ms", 0.60),
        (NARROW, "delta", "none", "fla", "forward_ms", 1.00),
        (NARROW, "kda", "weak", "deltazoo", "forward_ms", 0.60),
        (SMALL, "delta", "none", "deltazoo", "peak_mib", 1000.0),
        (SMALL, "delta", "none", "fla", "peak_mib", 1200.0),
        ("64x1x16x128x128", "delta", "none", "deltazoo", "step_tb_s", 1.6),
        ("2x2048x16x128x128", "delta", "none", "deltazoo", "cold_first_call_s", 12.0),
        ("2x2048x16x128x128", "delta", "none", "deltazoo", "new_kernels", 2.0),
    ]
    for *key, value in rows:
        one.add(OperatorRow(*key[:-1], measure=key[-1], value=value, run="one"))
    refusal = OperatorRow(
        TRAIN, "gdn", "medium", "fla", measure="forward_backward_ms", value=None, samples=0, run="one"
    )
    one.add(replace(refusal, error="RuntimeError: wrong results"))
    return one


def line(page: str, *cells: str) -> list[str]:
    """The one table line outside the summary that has all of these cells, split."""
    page = page[page.index("## Times") :] if "## Times" in page and "NVIDIA H200" not in cells else page
    found = [line for line in page.splitlines() if set(cells) <= {cell.strip() for cell in line.split("|")}]
    assert len(found) == 1, (cells, found)
    return [cell.strip() for cell in found[0].split("|")[1:-1]]


def test_a_saved_file_reads_back(results: OperatorResults, tmp_path: Path) -> None:
    results.save(tmp_path / "deep" / "run.json")
    assert OperatorResults.load([tmp_path / "deep" / "run.json"]) == results
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run.json"]


def test_the_later_run_wins_whatever_the_order_of_the_files(results: OperatorResults, tmp_path: Path) -> None:
    later = OperatorResults({"two": some_run("two", "2026-02-01T00:00:00.000000+00:00")})
    later.add(OperatorRow(TRAIN, "gdn", "medium", "deltazoo", measure="forward_ms", value=0.25, run="two"))
    results.save(tmp_path / "b.json")
    later.save(tmp_path / "a.json")
    for order in (["a.json", "b.json"], ["b.json", "a.json"]):
        merged = OperatorResults.load(tmp_path / name for name in order)
        assert merged.find(TRAIN, "gdn", "medium", "deltazoo", "forward_ms").value == 0.25
        assert merged.find(TRAIN, "gdn", "medium", "fla", "forward_ms").value == 0.90


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda c: c.update(schema=9), "schema 9, expected 1"),
        (lambda c: c["rows"][0].update(measure="forward_hours"), "forward_hours"),
        (lambda c: c["rows"][0].update(colour="red"), "colour"),
        (lambda c: c["rows"][0].update(run="lost"), "lost"),
        (lambda c: c["rows"][0].pop("op"), "op"),
        (lambda c: c.pop("runs"), "runs"),
    ],
)
def test_other_files_are_refused_by_name(results: OperatorResults, tmp_path: Path, spoil, complaint: str) -> None:
    path = tmp_path / "run.json"
    results.save(path)
    content = json.loads(path.read_text())
    spoil(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"run\.json is not a benchmark result.*{complaint}"):
        OperatorResults.load([path])


def test_verdicts() -> None:
    assert verdict(0.36, 0.36) == "met"
    assert verdict(0.45, 0.36) == "missed by 25%"
    assert verdict(1.6, 3.2, at_least=True) == "missed by 50%"
    assert verdict(3.3, 3.2, at_least=True) == "met"
    assert verdict(2, 0) == "missed: 2 instead of none"


def test_no_two_targets_are_about_one_row() -> None:
    keys = [(target.shape, op, target.measure) for target in TARGETS for op in target.ops]
    assert len(keys) == len(set(keys))


def test_the_page_sets_targets_and_peers_beside_the_values(results: OperatorResults) -> None:
    page = render_page(results, {})
    gdn = line(page, "gdn", "medium", "fwd")
    assert gdn[4:12] == ["0.3", "<= 0.225", "missed by 33%", "0.9", "3.00x", "", "", "1.02"]
    lower_bound_ns = 1032 / 4300
    assert gdn[12] == f"{Shape.parse(TRAIN).token_heads * lower_bound_ns / 1e6 / 0.30:.0%}"
    assert line(page, "gdn", "medium", "fwd+bwd")[4:9] == ["1.54", "<= 0.82", "missed by 88%", "fails (1)", ""]
    assert "1. fla gdn: RuntimeError: wrong results" in page


def test_the_page_takes_what_works_of_flash_linear_attention_and_says_how(results: OperatorResults) -> None:
    for library, value in (("fla-tilelang", 3.08), ("flashqla", 1.232), ("fla-flashqla", 1.3)):
        row = OperatorRow(TRAIN, "gdn", "medium", library, measure="forward_backward_ms", value=value, run="one")
        results.add(row)
    page = render_page(results, {})
    gdn = line(page, "gdn", "medium", "fwd+bwd")
    assert gdn[7:11] == ["3.08 (TileLang)", "2.00x", "1.23", "0.80x"]
    assert "2.0 to 2.0 times as fast as flash-linear-attention; FlashQLA takes 1.23 ms for gdn." in page
    assert "RuntimeError: wrong results" not in page
    results.add(
        OperatorRow(TRAIN, "gdn", "medium", "deltazoo", measure="forward_backward_graph_ms", value=0.77, run="one")
    )
    answer = render_page(results, {}).splitlines()[2]
    assert "replayed from a CUDA graph, take 0.77 ms with one decay per head" in answer
    assert "FlashQLA takes 1.23 ms in an eager call for gdn" in answer and "times as fast" not in answer


def test_the_summary_counts_and_lists_what_was_missed(results: OperatorResults) -> None:
    page = render_page(results, {})
    summary = page[page.index("## Targets") : page.index("## Times")]
    assert "2 of 7 measured values meet their target; these do not:" in summary
    assert sum(line.startswith("| ") for line in summary.splitlines()) == 2 + 5
    good = OperatorResults(results.runs)
    row = results.find(TRAIN, "gdn", "medium", "deltazoo", "forward_ms")
    assert row is not None
    good.add(replace(row, value=0.2))
    assert "1 of 1 measured values meet their target." in render_page(good, {})


def test_the_page_tells_runs_apart(results: OperatorResults) -> None:
    later = replace(some_run("two", "2026-02-01T00:00:00.000000+00:00"), commit="fedcba9876543210+changes")
    results.runs["two"] = later
    results.add(OperatorRow(TRAIN, "gdn", "medium", "deltazoo", measure="forward_ms", value=0.45, run="two"))
    page = render_page(results, {})
    assert "(2 of 6 of run a, 0 of 1 of run b)" in page
    assert line(page, "gdn", "medium", "fwd")[-1] == "a, b"
    assert line(page, "b", "NVIDIA H200")[2] == "`fedcba9876+changes`"
    missed = page[page.index("## Targets") : page.index("## Times")]
    assert (
        f"| {TRAIN} | gdn | medium | forward, eager, no gradient recorded | 0.45 | <= 0.225 | missed by 100% | b |"
        in missed
    )


def test_targets_relative_to_a_peer_need_it(results: OperatorResults) -> None:
    page = render_page(results, {})
    assert line(page, "delta", "none", "fwd")[5:7] == ["<= 0.5", "missed by 20%"]
    assert line(page, "kda", "weak", "fwd")[5:7] == ["0.5 x fla", "no fla value"]
    assert line(page, SMALL, "delta")[5:9] == ["1000", "<= 1200", "met", "1200"]


def test_rates_first_calls_and_recompilations_are_judged(results: OperatorResults) -> None:
    page = render_page(results, {})
    assert line(page, "64x1x16x128x128", "tb_s")[4:7] == ["1.6", ">= 3.2", "missed by 50%"]
    assert "| 12 | <= 15 | met |" in page and "| 2 | <= 0 | missed: 2 instead of none |" in page


def test_the_page_names_the_machine_and_the_commit(results: OperatorResults) -> None:
    run = line(render_page(results, {}), "a", "NVIDIA H200")
    assert run[1:3] == ["2026-01-02 03:04", "`0123456789`"] and run[-2:] == ["4.3", "790"]


def test_the_script_renders_what_the_harness_wrote(tmp_path: Path) -> None:
    plan = Plan(
        shapes=[Shape(1, T, 2, 16, 16) for T in (32, 64)],
        ops=["delta", "softmax"],
        groups=["forward", "training", "memory"],
        peers=["sdpa"],
        backend="chunkwise",
        device="cpu",
    )
    bench_ops(plan, tmp_path / "results" / "ops_a.json", timer=FakeTimer(), report=lambda line: None)
    # The rows of the small shapes pass for those of the sweep, which a CPU would take too long to measure.
    measured = OperatorResults.load([tmp_path / "results" / "ops_a.json"])
    [run] = [replace(run, copy_tb_s=4.0, matmul_tflop_s=700.0) for run in measured.runs.values()]
    sweep = OperatorResults({run.id: run})
    for row in measured.rows.values():
        shape = SWEEP[0] if row.shape.startswith("1x32x") else SWEEP[6]
        sweep.add(replace(row, shape=str(shape), library=row.library.removesuffix(" chunkwise")))
    sweep.save(tmp_path / "results" / "ops_a.json")

    command = [sys.executable, str(ROOT / "scripts" / "render_benchmarks.py"), "--results", str(tmp_path / "results")]
    command += ["--page", str(tmp_path / "docs" / "page.md"), "--plots", str(tmp_path / "docs" / "plots")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs" / "page.md").read_text()
    for name in ("time", "share", "memory"):
        assert f"](plots/{name}.png)" in page
        assert (tmp_path / "docs" / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "### long: 1x32768x16x128x128" in page


def test_the_committed_page_is_what_the_script_renders(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "render_benchmarks.py"), "--page", str(tmp_path / "page.md")]
    subprocess.run([*command, "--plots", str(tmp_path / "benchmarks")], check=True, capture_output=True)
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "benchmarks.md").read_text()


def test_without_a_sweep_there_are_no_plots(results: OperatorResults, tmp_path: Path) -> None:
    assert write_page(results, tmp_path / "page.md", tmp_path / "plots") == [tmp_path / "page.md"]
    assert "![" not in (tmp_path / "page.md").read_text()


def test_the_script_says_when_there_is_nothing_to_render(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "render_benchmarks.py"), "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no result files" in done.stderr


def test_spread_and_the_cpu_timer() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 5.0, 4.0, 100.0]) == Spread(3.5, 2.0, 5.0, 6)
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])
    calls: list[int] = []
    timer = timer_for("cpu")
    assert isinstance(timer, CpuTimer)
    spread = timer.milliseconds(lambda: calls.append(1))
    assert spread.count == 5 and len(calls) == 6 and 0 < spread.low <= spread.median <= spread.high
    with pytest.raises(NotImplementedError):
        timer.graph_milliseconds(lambda: None)
