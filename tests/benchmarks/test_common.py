"""Timing on a CPU, and result files: rows with the same setting are replaced, failures are rows, other files stay."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.common import Results, Spread, Timer


def results_in(path: Path, commit: str = "abc") -> Results:
    return Results(Namespace(out=path, device="cpu", commit=commit))


def test_a_spread_is_the_median_with_percentiles_and_a_slow_sample_is_a_low_speed() -> None:
    spread = Spread.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert spread == Spread(3.5, 2.0, 5.0, 6)
    assert spread.rate_of(10.0) == Spread(10 / 3.5, 2.0, 5.0, 6)
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


def test_a_cpu_is_timed_after_a_call_to_warm_up() -> None:
    calls: list[int] = []
    timer = Timer("cpu")
    spread = timer.milliseconds(lambda: calls.append(1))
    assert spread.samples == len(calls) - 1 == 5 and 0 <= spread.low <= spread.value <= spread.high
    assert timer.host_microseconds(lambda: None).samples == 5
    for measure in (timer.graph_milliseconds, timer.peak_mib):
        with pytest.raises(NotImplementedError):
            measure(lambda: None)


def test_rows_name_their_run_and_a_later_run_replaces_its_settings(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "run.json"
    first = results_in(out)
    first.add({"op": "gdn", "measure": "ms"}, 3.0)
    first.add({"op": "kda", "measure": "ms"}, Spread(1.0, 0.5, 2.0, 7))
    second = results_in(out, "def")
    assert (
        second.measure({"op": "gdn", "measure": "ms"}, lambda: 1 / 0)["error"] == "ZeroDivisionError: division by zero"
    )
    assert second.status() == 1 and second.has({"op": "kda"}) and not second.has({"op": "delta"})
    content = json.loads(out.read_text())
    assert [run["commit"] for run in content["runs"]] == ["abc", "def"]
    assert content["runs"][0]["torch"] == torch.__version__ and content["runs"][0]["cpu"]
    kda, gdn = content["rows"]
    assert kda == {"op": "kda", "measure": "ms", **vars(Spread(1.0, 0.5, 2.0, 7)), "run": first.run["id"]}
    assert gdn["value"] is None and gdn["run"] == second.run["id"]


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="not a result file"):
        results_in(tmp_path / "x.json")
    assert (tmp_path / "x.json").read_text() == "{}"
