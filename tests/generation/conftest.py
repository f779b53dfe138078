import pytest

from deltazoo.models import capture_conditions, captured_generation


@pytest.fixture
def captures(monkeypatch):
    """Captured steps so far, as if CUDA graphs ran on this device."""
    made = []

    def counting(step, changed):
        made.append(step)
        return step

    monkeypatch.setattr(captured_generation, "capture", counting)
    for module in (capture_conditions, captured_generation):
        monkeypatch.setattr(module, "graphs_run_on", lambda device: True)
    return made
