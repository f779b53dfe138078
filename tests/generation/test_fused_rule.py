"""A decoding step in pages of states does, to the bit, what one does on gathered states, for every rule in kernels.

The interpreter has to be chosen before Triton is imported, so a child process runs it.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from helpers import run_python
from torch import Tensor

import deltazoo
from deltazoo.generation.fused_rule import FusedRule, first_maps, why_not_this_rule
from deltazoo.layers import make_layer
from deltazoo.layers.state import LayerState, LayerStates

CHILD = """
import sys; sys.path[:0] = sys.argv[1:3]
import test_fused_rule as tests
for rule in tests.IN_KERNELS:
    tests.check_pages(rule, "cpu")
"""
WITHOUT_KERNELS = {"falcon", "isotropic_kdn", "diagonal_kdn", "momentum"}
"""Rules with a state of a scan, or with more key channels than their heads: a decoding step runs their layers."""
IN_KERNELS = [rule for rule in deltazoo.list_rules() if rule not in WITHOUT_KERNELS]
ROWS, PAGES = 3, 7


def in_pages(shapes: list[torch.Size], device: str) -> LayerState:
    """States of all pages as an engine lays them out: all tensors of a page side by side, then some room."""
    sizes = [shape.numel() for shape in shapes]
    block = torch.rand(PAGES, sum(sizes) + 8, device=device)  # a moment is not negative
    starts = itertools.accumulate(sizes, initial=0)
    pages = (block[:, a : a + n].unflatten(1, shape) for a, n, shape in zip(starts, sizes, shapes, strict=False))
    return LayerState(*pages)


def step(rule: FusedRule, parts: Tensor, state: LayerState, indices: Tensor | None) -> tuple[Tensor, Tensor]:
    from deltazoo.ops.decoding.convolution import convolve_parts

    mixed = convolve_parts(parts, rule.convolution(state), state_indices=indices)
    z, norm = rule(mixed, state, state_indices=indices)
    return z, norm.squares


def check_pages(name: str, device: str) -> None:
    torch.manual_seed(0)
    layer = make_layer(name, 24, 2, 12, layer_idx=0, num_layers=2, initializer_range=0.3).to(device)
    assert why_not_this_rule(layer) is None
    states, x = LayerStates(), torch.randn(1, 1, 24, device=device)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
        layer(x, past_key_values=states)
        maps = first_maps(layer)
        columns = dict(zip(maps, itertools.accumulate((len(m.weight) for m in maps.values()), initial=0), strict=False))
        product = torch.cat([torch.randn(ROWS, 24, device=device) @ m.weight.T for m in maps.values()], dim=1)[None]
        shapes = [x.shape[1:] for x in states.states[0] if x is not None]
        pages, indices = in_pages(shapes, device), torch.tensor([5, 0, 3], dtype=torch.int32, device=device)
        before = LayerState(*(None if x is None else x.clone() for x in pages))
        rule = FusedRule(layer, columns, lambda second: getattr(layer, second)[1])
        gathered = before.rows(indices.long())
        expected, squares = step(rule, product, gathered, None)
        found, found_squares = step(rule, product, pages, indices)
    assert torch.equal(found, expected) and torch.equal(found_squares, squares), name
    for page, old, new in zip(pages, before, gathered, strict=True):
        if page is not None:
            assert not torch.equal(old[indices.long()], new), name
            old[indices.long()] = new
            assert torch.equal(page, old), name


def test_pages_interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    here = Path(__file__).parent
    run_python(CHILD, str(here), str(here.parent), timeout=900)


def test_rules_without_kernels_say_so():
    for rule in WITHOUT_KERNELS:
        layer = make_layer(rule, 24, 2, 12, layer_idx=0, num_layers=2)
        assert why_not_this_rule(layer) == f"the rule {rule!r} has a decay or keys of its own"


@pytest.mark.gpu
@pytest.mark.parametrize("rule", IN_KERNELS)
def test_pages_on_the_gpu(rule):
    check_pages(rule, "cuda")
