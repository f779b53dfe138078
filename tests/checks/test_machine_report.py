"""`deltazoo check` without a rule: verdicts and versions, shown and written to a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import call

import deltazoo
from deltazoo.checks import kernel_check
from deltazoo.checks.kernel_check import Case

RIGHT = Case("scalar", 16, 8, T=40)


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    found = [RIGHT, replace(RIGHT, T=30)]
    monkeypatch.setattr(kernel_check, "cases", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return found


def test_a_machine_that_computes_right_says_so(two_cases: list[Case], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check") == 0
    shown = capsys.readouterr().out
    assert shown.count("\nok ") + shown.startswith("ok ") == 2 and "2 of 2 cases right." in shown
    assert f"| deltazoo | {deltazoo.__version__} |" in shown and "| backend | chunkwise |" in shown


def test_a_machine_that_computes_wrong_fails_and_writes_what(
    two_cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two_cases[1] = replace(RIGHT, keys="golden")
    page = tmp_path / "report.md"
    assert call("check", "--report", str(page), "--jobs", "0", "--backend", "chunkwise", "--device", "cpu") == 1
    assert "FAIL ValueError: unknown kind of keys 'golden'" in capsys.readouterr().out
    written = page.read_text()
    assert "1 of 2 cases right." in written and written.count("FAIL") == 1 and "decay=scalar K=16" in written
    assert f"| torch | {torch.__version__} |" in written


def test_triton_where_there_is_none_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", "--backend", "triton", "--device", "cpu") == 1
    assert "Error: the triton backend cannot run this call" in " ".join(capsys.readouterr().err.split())
