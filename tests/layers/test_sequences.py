"""Padding masks and packing boundaries turned into descriptions of a batch."""

import pytest
import torch

from deltazoo.generation.batch import describe_batch
from deltazoo.layers import WHOLE_ROWS, PackedSequences, PaddedSequences, describe_sequences


def test_arranging_keeps_the_order_and_restoring_undoes_it() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    sequences = describe_sequences(5, 5, attention_mask=mask)
    assert isinstance(sequences, PaddedSequences)
    x = torch.arange(1.0, 26.0).view(5, 5, 1)
    arranged = sequences.arrange(x)
    assert arranged[..., 0].tolist() == [
        [3, 4, 5, 0, 0],
        [6, 7, 8, 0, 0],
        [11, 13, 15, 0, 0],
        [0, 0, 0, 0, 0],
        [21, 22, 23, 24, 25],
    ]
    assert torch.equal(sequences.lengths[:, 0], mask.sum(1))
    assert torch.equal(~sequences.padding, arranged[..., 0] > 0)
    assert torch.equal(sequences.restore(arranged + 1), (x + 1) * mask[..., None])


def test_values_at_padded_positions_go_nowhere_not_even_nan() -> None:
    sequences = PaddedSequences.from_mask(torch.tensor([[1, 0, 1]]))
    x = torch.tensor([1.0, float("nan"), 3.0]).view(1, 3, 1).requires_grad_()
    y = sequences.restore(sequences.arrange(x))
    assert y.flatten().tolist() == [1, 0, 3]
    assert torch.autograd.grad(y.sum(), x)[0].flatten().tolist() == [1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_tokens_know_their_sequence(dtype: torch.dtype) -> None:
    sequences = describe_sequences(1, 6, cu_seqlens=torch.tensor([0, 0, 2, 2, 5, 6, 6], dtype=dtype))
    assert isinstance(sequences, PackedSequences)
    assert sequences.index.tolist() == [1, 1, 3, 3, 3, 4]
    assert sequences.num_sequences == 6
    assert sequences.positions.tolist() == [[0, 1, 0, 1, 2, 0]]


def test_packed_rows_are_joined_into_one() -> None:
    starts = torch.tensor([[True, False, True], [True, False, False]])
    sequences = PackedSequences.from_starts(starts)
    assert sequences.cu_seqlens.tolist() == [0, 2, 3, 6]
    assert torch.equal(sequences.positions == 0, starts)
    x = torch.arange(12.0).view(2, 3, 2)
    joined = sequences.arrange(x)
    assert joined.shape == (1, 6, 2)
    assert torch.equal(sequences.restore(joined), x)
    assert torch.equal(sequences.arrange(x[:1]), torch.cat([x[:1], x[:1]], dim=1))


def test_whole_rows() -> None:
    assert describe_sequences(2, 3) is WHOLE_ROWS


@pytest.mark.parametrize(
    ("batch_size", "arguments", "message"),
    [
        (1, {"attention_mask": torch.ones(1, 4), "cu_seqlens": torch.tensor([0, 4])}, "one of them, not both"),
        (2, {"attention_mask": torch.ones(2, 5, dtype=torch.long)}, r"must have shape \(2, 4\).* got \(2, 5\)"),
        (2, {"attention_mask": torch.ones(2, 1, 4, 4, dtype=torch.bool)}, r"got \(2, 1, 4, 4\)"),
        (2, {"attention_mask": torch.ones(2, 4)}, "must be bool or integer.* got torch.float32"),
        (1, {"cu_seqlens": torch.tensor([0.0, 4.0])}, "int32 or int64.* got torch.float32"),
        (1, {"cu_seqlens": torch.tensor([0])}, r"N >= 1, got \(1,\)"),
        (2, {"cu_seqlens": torch.tensor([0, 4])}, "need batch size 1, got 2"),
        (1, {"cu_seqlens": torch.tensor([1, 4])}, "must start at 0, got 1"),
        (1, {"cu_seqlens": torch.tensor([0, 3])}, "must end at the number of tokens, 4, got 3"),
        (1, {"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "must not descend"),
    ],
)
def test_bad_descriptions_are_refused(batch_size: int, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_sequences(batch_size, 4, **arguments)


@pytest.mark.parametrize("shape", [(1, 6), (3, 6), (2, 4)])
def test_a_prepared_mask_of_another_batch_is_refused(shape: tuple[int, int]) -> None:
    masks = {"linear_attention": torch.ones(shape, dtype=torch.bool), "full_attention": None}
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(2, 6\)"):
        describe_batch(2, 6, 0, torch.device("cpu"), attention_mask=masks)
