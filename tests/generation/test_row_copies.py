"""Rows copied one by one are those of `snapshot` and `restore`, to the last bit, and no other row changes."""

import pytest
import torch
from tiny_models import tiny_model, tokens
from transformers import DynamicCache

from deltazoo.generation import restore, snapshot
from deltazoo.generation.row_copies import RowCopies
from deltazoo.generation.static_cache import fixed_cache

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def filled(case, rows, device, start):
    """A static cache of a model with half weights, whose states have two dtypes, after some tokens."""
    model = tiny_model(case).to(device, torch.bfloat16)
    cache = fixed_cache(model, 1)
    with torch.no_grad():
        model(tokens(rows, 5 + start)[:, start:].to(device), past_key_values=cache)
    return cache


def same(a, b):
    pairs = zip(a.layers, b.layers, strict=True)
    return all(x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x) for x, y in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["gated_deltanet", "kda_without_conv", "longhorn", "grouped_values"])
def test_copies(case, device):
    cache, other = filled(case, 4, device, 0), filled(case, 3, device, 2)
    dtypes = {x.dtype for x in snapshot(cache).layers[0].values()}
    assert RowCopies.serve(cache) and len(dtypes) == (1 if case == "kda_without_conv" else 2)
    copies, before = RowCopies(cache), snapshot(cache)
    taken, expected = RowCopies(other).take(2), snapshot(other, rows=[2])
    assert taken.nbytes == expected.nbytes
    restore(other, before.select([0, 0, 0]))  # what was taken is a copy
    copies.put(1, taken)
    assert same(snapshot(cache, rows=[1]), expected)
    assert same(snapshot(cache, rows=[0, 2, 3]), before.select([0, 2, 3]))
    copies.move([2, 1], [3, 0])
    assert same(snapshot(cache, rows=[0, 1, 2, 3]), _joined(expected, expected, before.select([2, 2])))
    copies.put(2, copies.empty())
    assert not any(x.any() for layer in snapshot(cache, rows=[2]).layers for x in layer.values())
    assert same(snapshot(cache, rows=[0, 1, 3]), _joined(expected, expected, before.select([2])))


def _joined(*snapshots):
    first, *others = snapshots
    for other in others:
        layers = zip(first.layers, other.layers, strict=True)
        tensors = iter([torch.cat([x[name], y[name]]) for x, y in layers for name in x])
        first = first.with_tensors(lambda x, tensors=tensors: next(tensors))
    return first


def test_which_caches_are_served():
    assert not RowCopies.serve(fixed_cache(tiny_model("hybrid"), 8))
    assert not RowCopies.serve(DynamicCache(config=tiny_model("hybrid").config))
