"""How the tests judge results is tested too."""

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
