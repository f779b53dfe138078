"""One model that several threads use: `deltazoo.generate`, `model.generate` and forward passes as if one by one."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from decoding_loops import model_of, ordinary, own
from tiny_models import tokens

from deltazoo.generation import Decoder, conditions
from deltazoo.generation.step_modules import JointProduct, merged_products

KINDS = ["hybrid", "llama 1:1", "qwen3_next"]
WAIT = 5.0
"""Seconds after which a thread goes on, in a test that fails."""


def own_loop(model, ids):
    return own(model, ids, torch.ones_like(ids), 5)


def hf_loop(model, ids):
    return ordinary(model, ids, torch.ones_like(ids), 5)


def forward(model, ids):
    with torch.no_grad():
        return model(ids).logits


def threads_with_merged_maps(monkeypatch):
    """Those that compute merged products from here on."""
    found, multiply = set(), JointProduct._multiply

    def recorded(product, x):
        found.add(threading.get_ident())
        return multiply(product, x)

    monkeypatch.setattr(JointProduct, "_multiply", recorded)
    return found


class Held:
    """Holds the first step of `deltazoo.generate` in one thread, with the forward passes that it has replaced."""

    def __init__(self, model, monkeypatch):
        self.linear = merged_products(model)[0].linears[0]
        self.thread = None
        self.reached, self.may_end = threading.Event(), threading.Event()
        self.seconds = WAIT
        take = Decoder._draw

        def held_take(decoder, logits):
            if threading.get_ident() == self.thread and self.is_replaced() and not self.reached.is_set():
                self.reached.set()
                self.may_end.wait(self.seconds)
            return take(decoder, logits)

        monkeypatch.setattr(Decoder, "_draw", held_take)

    def is_replaced(self):
        return "forward" in vars(self.linear)

    def run(self, model, ids):
        self.thread = threading.get_ident()
        return own_loop(model, ids)


class ReadByOthers(list):
    """A module's attribute. When another thread than the held one reads it, the held step ends before it reads on."""

    def __init__(self, held):
        super().__init__([1])
        self.held = held

    def __iter__(self):
        if self.held.reached.is_set() and threading.get_ident() != self.held.thread:
            self.held.may_end.set()
            for _ in range(1000):
                if not self.held.is_replaced():
                    break
                threading.Event().wait(WAIT / 1000)
        return super().__iter__()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_made_while_another_thread_runs_one(kind, monkeypatch):
    """Attributes of modules are read while the other thread gives modules their own forward passes back."""
    model, ids, others = model_of(kind), tokens(1, 5), tokens(2, 7, seed=1)
    expected = own_loop(model, ids), own_loop(model, others)
    held = Held(model, monkeypatch)
    held.seconds = 0.3  # the other thread waits for this one
    held.linear.settings = ReadByOthers(held)
    merged = threads_with_merged_maps(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(held.run, model, ids)
        assert held.reached.wait(WAIT)
        second = pool.submit(own_loop, model, others)
        results = first.result(), second.result()
    assert len(merged) == 2  # the second step waits until the modules have their own forward passes back
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("run", [hf_loop, forward])
@pytest.mark.parametrize("kind", KINDS)
def test_other_calls_run_the_modules_own_forward_passes(kind, run, monkeypatch):
    """While a thread holds a step with merged maps, another one computes without them, and does not wait."""
    model, ids, others = model_of(kind), tokens(1, 5), tokens(1, 7, seed=1)
    expected = own_loop(model, ids), run(model, others)
    held, merged = Held(model, monkeypatch), threads_with_merged_maps(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(held.run, model, ids)
        assert held.reached.wait(WAIT)
        result = run(model, others)
        assert held.is_replaced() and conditions._unusual_module(model) is None
        held.may_end.set()
        assert torch.equal(first.result(), expected[0])
    assert torch.equal(result, expected[1])
    assert merged == {held.thread}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", KINDS[::2])
def test_many_calls_at_once(kind, captured, request):
    """Switching threads as often as Python can, every call gives what it gives alone.

    Where `model.generate` captures its step, one call at a time does, and the others run the ordinary loop.
    """
    if captured:
        request.getfixturevalue("captures")
    model = model_of(kind)
    calls = [(run, tokens(1 + i % 2, 3 + i, seed=i)) for i in range(4) for run in (own_loop, hf_loop, forward)]
    expected = [run(model, ids) for run, ids in calls]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(lambda call: call[0](model, call[1]), calls))
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())
