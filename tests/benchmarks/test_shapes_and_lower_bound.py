"""Shapes are read strictly; the lower bound has the bytes and operations of a count by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import lower_bound
from benchmarks.inputs import make_inputs
from benchmarks.lower_bound import Ceilings, lower_bound_ms
from benchmarks.shapes import SWEEP, TABLE, Shape, parse_shapes

D128 = Shape(8, 4096, 16, 128, 128)


def test_names_groups_and_numbers_mix_without_duplicates() -> None:
    shapes = parse_shapes("train, 2x64x3x16x33,sweep,long")
    assert shapes[:2] == [TABLE["train"], Shape(2, 64, 3, 16, 33)]
    assert shapes[2:] == SWEEP  # long is one of the sweep
    assert [str(s) for s in (SWEEP[0], SWEEP[-1])] == ["1x512x16x128x128", "1x131072x16x128x128"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("trian", "did you mean 'train'"),
        ("8x4096x16x128", "BxTxHxKxV"),
        ("8x0x16x128x128", "positive"),
        (" , ", "no shape"),
    ],
)
def test_what_is_no_shape_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_shapes(text)


def test_bytes_per_token_and_head() -> None:
    # q, k, v, o in 16 bits are 1024 bytes at K = V = 128; beta is 4, a scalar gate 4, a channel gate 512.
    assert [lower_bound.forward_bytes(D128, op) for op in ("delta", "gdn", "kda")] == [1028, 1032, 1540]
    # q, k, v, dO, dq, dk, dv are 1792 bytes; beta, the gate and both their gradients come on top.
    assert [lower_bound.backward_bytes(D128, op) for op in ("delta", "gdn", "kda")] == [1800, 1808, 2824]


def test_operations_per_token_and_head() -> None:
    small, big = 2 * 64 * 128, 2 * 128 * 128  # per token: C x C x 128 and C x 128 x 128 products of a chunk
    assert lower_bound.forward_operations(D128) == 4 * small + 3 * big + 64 * 64
    assert lower_bound.backward_operations(D128) == 10 * small + 8 * big


def test_the_lower_bound_is_the_longer_of_memory_and_arithmetic() -> None:
    ceilings = Ceilings(copy_tb_s=4.3, matmul_tflop_s=790)
    tokens = D128.token_heads
    forward = lower_bound_ms(D128, "gdn", backward=False, ceilings=ceilings)
    both = lower_bound_ms(D128, "gdn", backward=True, ceilings=ceilings)
    assert forward * 1e6 / tokens == pytest.approx(1032 / 4300, rel=1e-12)  # ns; memory bound
    assert (both - forward) * 1e6 / tokens == pytest.approx(425984 / 790e3, rel=1e-9)  # ns; arithmetic bound
    assert lower_bound_ms(D128, "kda", backward=False, ceilings=ceilings) > forward
    with pytest.raises(KeyError):
        lower_bound_ms(D128, "softmax", backward=False, ceilings=ceilings)


def test_value_heads_that_share_keys() -> None:
    shape = Shape.parse("8x4096x4/16x128x128")
    assert shape == TABLE["grouped"] and str(shape) == "8x4096x4/16x128x128"
    assert shape.token_heads == TABLE["train"].token_heads
    assert lower_bound.forward_bytes(shape, "gdn") == 2 * (2 * 32 + 2 * 128) + 8
    inputs = make_inputs(replace(shape, T=8), "gdn", "medium", device="cpu")
    assert inputs.k.shape == (8, 8, 4, 128) and inputs.v.shape == (8, 8, 16, 128)
    assert inputs.beta is not None and inputs.beta.shape == (8, 8, 16)
    with pytest.raises(ValueError, match="multiple of key heads"):
        Shape.parse("1x64x4/6x8x8")
