from contextlib import contextmanager

import pytest
from replayed_operations import ReplayedOperations

from deltazoo.generation import conditions, hf_generate, step
from deltazoo.generation.capture import NoWaiting
from deltazoo.ops import api


@pytest.fixture
def captures(monkeypatch):
    """The steps captured so far, as if CUDA graphs ran on this device. A step that a graph could not hold raises."""
    made = []

    def as_a_graph(step, changed):
        with _restored(changed), NoWaiting(changed[0].device):
            step()
        made.append(step)
        return step

    _as_on_a_gpu(monkeypatch, as_a_graph)
    for module in (conditions, hf_generate):
        monkeypatch.setattr(module, "graphs_run_on", lambda device: True)
    return made


@pytest.fixture
def replays(monkeypatch):
    """Steps are captured as CUDA graphs would be: what Python did while a step was captured does not happen again."""

    def as_a_graph(step, changed):
        with _restored(changed), NoWaiting(changed[0].device):
            step()
        with _restored(changed):
            return ReplayedOperations(step).replay

    _as_on_a_gpu(monkeypatch, as_a_graph)


@contextmanager
def _restored(changed):
    before = [x.clone() for x in changed]
    try:
        yield
    finally:
        for x, value in zip(changed, before, strict=True):
            x.copy_(value)


def _as_on_a_gpu(monkeypatch, capture):
    monkeypatch.setattr(api, "check_tensor_values", lambda *args: None)  # reads values on a CPU alone
    monkeypatch.setattr(step, "capture", capture)
