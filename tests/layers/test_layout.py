"""Padding masks and packing boundaries turned into layouts."""

import pytest
import torch

from deltazoo.layers import PackedLayout, PaddedLayout, token_layout


def test_compacting_keeps_the_order_and_restoring_undoes_it() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    layout = token_layout(5, 5, attention_mask=mask)
    assert isinstance(layout, PaddedLayout)
    x = torch.arange(1.0, 26.0).view(5, 5, 1)
    compact = layout.compact(x)
    assert compact[..., 0].tolist() == [
        [3, 4, 5, 0, 0],
        [6, 7, 8, 0, 0],
        [11, 13, 15, 0, 0],
        [0, 0, 0, 0, 0],
        [21, 22, 23, 24, 25],
    ]
    assert torch.equal(layout.lengths[:, 0], mask.sum(1))
    assert torch.equal(layout.real, compact[..., 0] > 0)
    assert torch.equal(layout.restore(compact), x * mask[..., None])


def test_values_at_padded_positions_go_nowhere_not_even_nan() -> None:
    layout = PaddedLayout.from_mask(torch.tensor([[1, 0, 1]]))
    x = torch.tensor([1.0, float("nan"), 3.0]).view(1, 3, 1).requires_grad_()
    y = layout.restore(layout.compact(x))
    assert y.flatten().tolist() == [1, 0, 3]
    assert torch.autograd.grad(y.sum(), x)[0].flatten().tolist() == [1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_tokens_know_their_sequence(dtype: torch.dtype) -> None:
    layout = token_layout(1, 6, cu_seqlens=torch.tensor([0, 0, 2, 2, 5, 6, 6], dtype=dtype))
    assert isinstance(layout, PackedLayout)
    assert layout.sequence.tolist() == [1, 1, 3, 3, 3, 4]
    assert layout.num_sequences == 6


def test_whole_rows_need_no_layout() -> None:
    assert token_layout(2, 3) is None


@pytest.mark.parametrize(
    ("batch_size", "arguments", "message"),
    [
        (1, {"attention_mask": torch.ones(1, 4), "cu_seqlens": torch.tensor([0, 4])}, "one of them, not both"),
        (2, {"attention_mask": torch.ones(2, 5, dtype=torch.long)}, r"must have shape \(2, 4\).* got \(2, 5\)"),
        (2, {"attention_mask": torch.ones(2, 1, 4, 4, dtype=torch.bool)}, r"got \(2, 1, 4, 4\)"),
        (2, {"attention_mask": torch.ones(2, 4)}, "must be bool or integer.* got torch.float32"),
        (1, {"cu_seqlens": torch.tensor([0.0, 4.0])}, "int32 or int64.* got torch.float32"),
        (1, {"cu_seqlens": torch.tensor([0])}, r"N >= 1, got torch.int64 of shape \(1,\)"),
        (2, {"cu_seqlens": torch.tensor([0, 4])}, "need batch size 1, got 2"),
        (1, {"cu_seqlens": torch.tensor([1, 4])}, "must start at 0, got 1"),
        (1, {"cu_seqlens": torch.tensor([0, 3])}, "must end at the number of tokens, 4, got 3"),
        (1, {"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "must not descend"),
    ],
)
def test_bad_descriptions_are_refused(batch_size: int, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_layout(batch_size, 4, **arguments)
