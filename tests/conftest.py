"""What every test shares: a seed, one thread, poisoned uninitialised memory, and the rule for tests that need a GPU."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors
from xdist.scheduler import LoadFileScheduling

if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and (count := torch.cuda.device_count()) > 1:
    # Workers take GPUs in turn: each sees all of them, beginning with its own. CUDA reads this when it first runs.
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    first = int(worker.removeprefix("gw")) % count
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*gpus[first:], *gpus[:first]])

KERNELS = ("dtype", "K", "V", "decay", "num_micro_steps", "n")
"""Parameters of tests, and fields of their cases, that decide which kernels of the operator are compiled."""


def groups_file(workerinput: dict[str, Any]) -> Path:
    """Where the first worker leaves the group of each test for the scheduler, which sees no parameters of tests."""
    return Path(tempfile.gettempdir(), f"groups_{workerinput['testrunuid']}.json")


class GroupScheduling(LoadFileScheduling):
    """Gives workers one group of `kernels_of` at a time, in the order of `pytest_collection_modifyitems`."""

    def schedule(self) -> None:
        if self.collection is None and any(self.registered_collections.values()):
            path = groups_file(self.nodes[0].workerinput)
            self.groups: dict[str, str] = json.loads(path.read_text())
            path.unlink()
        super().schedule()
        super().schedule()  # a worker begins a test when it has the next, and groups of one test have none

    def remove_node(self, node: Any) -> str | None:
        """The test at which a worker died, which is not run again; others take what is left of its groups."""
        left = self.assigned_work.pop(node)
        died = next((test for group in left.values() for test, done in group.items() if not done), None)
        if died is not None:
            left[self.groups[died]][died] = True
            self.workqueue.update({name: group for name, group in left.items() if not all(group.values())})
            for other in self.nodes:
                self._reschedule(other)
        return died

    def _split_scope(self, nodeid: str) -> str:
        return self.groups[nodeid]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Gives workers one file at a time, so that the fixtures of a file are made once, in the order of
    `pytest_collection_modifyitems`.

    With `--dist loadgroup` one group of tests that share kernels.
    """
    config.option.loadscopereorder = False
    return (GroupScheduling if config.option.dist == "loadgroup" else LoadFileScheduling)(config, log)


def kernels_of(item: pytest.Item) -> str:
    """A name that tests of a file share if they compile the same kernels, as far as their parameters tell."""
    if item.get_closest_marker("processes"):
        return item.nodeid
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    subject = next((given[name] for name in ("case", "rule", "kind", "check") if name in given), None)
    values = [given.get(name, getattr(subject, name, None)) for name in KERNELS]
    if isinstance(subject, str):
        values = [subject]
    elif subject is not None:
        values.append(getattr(subject, "__name__", type(subject).__name__))
    return " ".join([item.nodeid.partition("::")[0], *(str(value) for value in values if value is not None)])


def cost_of(item: pytest.Item, tests: int) -> tuple[bool, bool, int]:
    """What costs most compares highest: several processes, then the operator's kernels, then many tests at once."""
    return bool(item.get_closest_marker("processes")), "ops/triton/" in item.nodeid, tests


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if worker:
        by_kernels = config.getoption("loadgroup", False)
        groups = {item.nodeid: kernels_of(item) if by_kernels else str(item.path) for item in items}
        sizes = Counter(groups.values())
        items.sort(key=lambda item: cost_of(item, sizes[groups[item.nodeid]]), reverse=True)
        if by_kernels and worker == "gw0" and items:
            groups_file(config.workerinput).write_text(json.dumps(groups))  # type: ignore[attr-defined]
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
