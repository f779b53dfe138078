import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltazoo.generation import decoder
from deltazoo.models import capture_conditions, captured_generation
from deltazoo.ops import api

WAITING = ("_local_scalar_dense", "nonzero", "lift_fresh", "equal", "masked_select", "_unique2", "unique_dim")


class NoWaiting(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU, or copy from the host: a graph can hold neither."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if name in WAITING or masks:
            raise RuntimeError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def captures(monkeypatch):
    """Captured steps so far, as if CUDA graphs ran on this device; a step must do nothing that a graph cannot."""
    made = []

    def as_a_graph(step, changed, generators=()):
        before = [x.clone() for x in changed]
        states = [generator.get_state() for generator in generators]
        try:
            with NoWaiting():
                step()
        finally:
            for x, value in zip(changed, before, strict=True):
                x.copy_(value)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        made.append(step)
        return step

    monkeypatch.setattr(api, "check_tensor_values", lambda *args: None)  # reads values on a CPU alone
    for module in (captured_generation, decoder):
        monkeypatch.setattr(module, "capture", as_a_graph)
    for module in (capture_conditions, captured_generation):
        monkeypatch.setattr(module, "graphs_run_on", lambda device: True)
    return made
