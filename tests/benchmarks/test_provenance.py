"""Machine, versions and commit of a result, with git and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import provenance
from benchmarks.provenance import describe_run, git_commit, gpu_name, package_version


def test_a_run_names_what_it_ran_on() -> None:
    run = describe_run(device="cpu", commit="0123456789abcdef+changes", command=["bench"], copy_tb_s=4.0)
    assert run.torch == torch.__version__ and run.gpu is None and run.driver is None and run.copy_tb_s == 4.0
    assert run.short_commit == "0123456789+changes" and run.id.endswith("-0123456789ab")
    assert run.machine.startswith(run.cpu) and str(torch.get_num_threads()) in run.machine
    assert gpu_name("cpu") is None and package_version("no-such-package") is None


@pytest.mark.parametrize(
    ("head", "status", "expected"),
    [("abc", None, "abc"), ("abc", " M src/deltazoo/spec.py", "abc+changes"), (None, None, "unknown")],
)
def test_the_commit_is_marked_when_files_differ(
    monkeypatch: pytest.MonkeyPatch, head: str | None, status: str | None, expected: str
) -> None:
    asked: list[tuple[str, ...]] = []

    def output(*command: str) -> str | None:
        asked.append(command)
        return head if "rev-parse" in command else status

    monkeypatch.setattr(provenance, "_output", output)
    assert git_commit(Path("src"), Path("tests")) == expected
    assert head is None or asked[-1][-2:] == ("src", "tests")
