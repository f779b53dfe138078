"""The command line: one line and exit status 1 for bad input, a result file for good input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import invoke

from benchmarks import command, operator_suite
from benchmarks.operator_results import OperatorResults
from benchmarks.operator_suite import DeviceLost
from deltazoo.checks.kernel_check import Verdict

OPS = ["ops", "--device", "cpu", "--backend", "chunkwise", "--shapes", "1x32x2x8x8"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "nothing to do"),
        (["--check", "--backend", "chunk"], "unknown backend 'chunk'"),
        (["--check", "ops", "--out", "x.json"], "--check stands alone"),
        ([*OPS, "--out", "x.json", "--ops", "gnd"], "unknown operator 'gnd'"),
        ([*OPS, "--out", "x.json", "--gates", "strange"], "unknown gate strength 'strange'"),
        ([*OPS, "--out", "x.json", "--measure", ","], "no measure given"),
        ([*OPS, "--out", "x.json", "--peers", "flaa"], "did you mean 'fla'"),
        ([*OPS, "--out", "x.json", "--shapes", "lang"], "did you mean 'long'"),
        ([*OPS, "--out", "x.json", "--measure", "graphs,cold"], "--measure graphs,cold needs a GPU"),
        (["ops", "--device", "cpu", "--backend", "triton", "--out", "x.json"], "--backend triton needs a GPU"),
    ],
)
def test_bad_input_is_one_line_and_status_1(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    arguments = [str(tmp_path / "x.json") if argument == "x.json" else argument for argument in arguments]
    outcome = invoke("bench", *arguments)
    assert outcome.exit_code == 1
    assert complaint in outcome.output and "Traceback" not in outcome.output
    assert not (tmp_path / "x.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU; this one has one")
def test_no_gpu_is_said_so(tmp_path: Path) -> None:
    for arguments in (["--check"], ["ops", "--out", str(tmp_path / "x.json")]):
        outcome = invoke("bench", *arguments)
        assert outcome.exit_code == 1 and "no NVIDIA GPU" in outcome.output


def test_a_spoiled_result_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    outcome = invoke("bench", *OPS, "--out", str(tmp_path / "x.json"))
    assert outcome.exit_code == 1 and "not a benchmark result" in outcome.output
    assert (tmp_path / "x.json").read_text() == "{}"


def test_the_module_runs_without_the_packages_of_training(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "from benchmarks.command import app\n"
        f"app({[*OPS, '--ops', 'delta,softmax', '--measure', 'forward', '--peers', 'sdpa', '--out', str(out)]!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 rows, 0 of them failures" in done.stdout
    assert {row.library for row in OperatorResults.load([out]).rows.values()} == {"deltazoo chunkwise", "sdpa"}
    command = [sys.executable, "-m", "deltazoo", "bench", "--help"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_on_a_cpu_everything_that_is_measured_works(tmp_path: Path) -> None:
    """Without further options: what needs a GPU is left out and named."""
    out = tmp_path / "run.json"
    arguments = ["ops", "--device", "cpu", "--shapes", "1x32x2x8x8", "--gates", "weak", "--peers", "fla,sdpa"]
    outcome = invoke("bench", *arguments, "--out", str(out))
    assert outcome.exit_code == 0, outcome.output
    assert "not measured on a CPU: graphs, memory, cold, decode, fla" in outcome.output
    rows = OperatorResults.load([out]).rows.values()
    assert {row.measure for row in rows} >= {"forward_ms", "forward_backward_ms", "host_forward_us"}
    assert {row.library for row in rows} == {"deltazoo chunkwise", "sdpa"}
    assert all(row.value is not None for row in rows)


def test_a_failure_of_this_run_is_status_1_and_an_old_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object, **options: object) -> None:
        raise RuntimeError("this kernel is broken")

    arguments = [*OPS, "--measure", "forward", "--peers", "none", "--out", str(tmp_path / "run.json")]
    with monkeypatch.context() as patch:
        patch.setattr("benchmarks.operator_candidates.delta_rule", failing)
        assert invoke("bench", *arguments, "--ops", "delta").exit_code == 1
        assert invoke("bench", *arguments, "--ops", "delta", "--resume").exit_code == 1
    outcome = invoke("bench", *arguments, "--ops", "gdn", "--gates", "weak")
    assert outcome.exit_code == 0 and "2 of them failures" in outcome.output


def test_a_lost_device_goes_on_in_a_new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lose(*arguments: object, **options: object) -> None:
        raise DeviceLost("the GPU no longer answers")

    class Replaced(Exception):
        pass

    def execv(program: str, arguments: list[str]) -> None:
        raise Replaced(program, arguments)

    monkeypatch.setattr(operator_suite, "bench_ops", lose)
    monkeypatch.setattr(command.os, "execv", execv)
    with pytest.raises(Replaced) as replaced:
        invoke("bench", *OPS, "--out", str(tmp_path / "x.json"))
    assert replaced.value.args == (sys.executable, [*sys.orig_argv, "--resume"])


@pytest.mark.parametrize("right", [True, False])
def test_the_check_ends_with_a_status(monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    def run(*, report, **options: object) -> list[Verdict]:
        found = [Verdict("easy", "output", 1e-3, 1e-2), Verdict("hard", "d_k", 1e-3 if right else 0.5, 1e-2)]
        for verdict in found:
            report(verdict)
        return found

    monkeypatch.setattr("deltazoo.checks.kernel_check.run_selfcheck", run)
    outcome = invoke("bench", "--check", "--backend", "chunkwise", "--device", "cpu")
    assert outcome.exit_code == (0 if right else 1)
    assert ("FAIL hard" in outcome.output) == (not right) and f"{1 + right} of 2 cases right" in outcome.output
