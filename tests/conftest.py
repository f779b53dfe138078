"""What every test shares: a seed, one thread, poisoned uninitialised memory, and the rule for tests that need a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors
from xdist.scheduler import LoadFileScheduling


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Gives workers one file at a time, large ones first, so that the fixtures of a file are made once."""
    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU; torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    """Millions of objects that live until the end: each collection of garbage within a test would visit them."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread: the same summation order on every machine, and no fight between pytest-xdist workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed 0; where there is no GPU, without `torch.manual_seed`, which formats a traceback for each absent device."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "meta" and (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.fill_(float("nan"))
    return tensor


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills what ``torch.empty`` and its kin hand out with NaN, so that an element nobody writes shows."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_nan(*args: Any, **kwargs: Any) -> torch.Tensor:
            with torch.no_grad():
                tensor = _poison(allocate(*args, **kwargs).detach())
            return tensor.requires_grad_(kwargs.get("requires_grad", False))

        return allocate_nan

    _device_constructors()  # torch remembers them from the first call, which must not see ours
    for owner, name in [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ]:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
