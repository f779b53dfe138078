"""How the tests judge results, and how workers share them, is tested too."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers import Missed, known_miss


def judged(size: float | None) -> None:
    with known_miss("a reason", at_most=0.5):
        if size is not None:
            raise Missed("off", size)


def test_a_known_miss_is_an_expected_failure_up_to_its_ceiling():
    with pytest.raises(pytest.xfail.Exception, match=r"a reason \(here 0.5, allowed up to 0.5\)"):
        judged(0.5)


@pytest.mark.parametrize("size", [0.51, float("inf"), float("nan")])
def test_a_worse_miss_fails(size):
    with pytest.raises(AssertionError, match="worse than its known miss"):
        judged(size)


def test_nothing_missed_fails(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(pytest.fail.Exception, match="passes, so its known miss can go: a reason"):
        judged(None)


def test_on_another_gpu_nothing_need_be_missed(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    judged(None)


@pytest.mark.parametrize("error", [AssertionError, ValueError])
def test_other_failures_are_none_that_is_known(error):
    with pytest.raises(error, match="something else"), known_miss("a reason", at_most=0.5):
        raise error("something else")


ONE_DIES = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("case", ["one", "two", "three", "dies"])
def test(case, number):
    if (case, number) == ("dies", 1):
        os._exit(1)
"""


@pytest.mark.processes
def test_groups_stay_together_and_a_worker_that_dies_costs_one_test(tmp_path):
    (tmp_path / "test_cases.py").write_text(ONE_DIES)
    here = Path(__file__).parent
    options = ["-p", "conftest", "-v", "-n", "2", "--dist", "loadgroup", "-c", str(here.parent / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        capture_output=True, text=True, timeout=200, check=False, env=os.environ | {"PYTHONPATH": str(here)},
    )  # fmt: skip
    found = re.findall(r"^\[(gw\d)\] .* (PASSED|FAILED) .*\[(\w+)-(\d)\]", done.stdout, re.MULTILINE)
    assert Counter(outcome for _, outcome, *_ in found) == {"PASSED": 11, "FAILED": 1}, done.stdout
    assert [(case, number) for _, outcome, case, number in found if outcome == "FAILED"] == [("dies", "1")]
    assert all(len({worker for worker, _, x, _ in found if x == case}) == 1 for case in ("one", "two", "three"))
