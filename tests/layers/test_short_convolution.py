"""The short convolution against nn.functional.conv1d, with states, padding and packing."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.layers import PaddedSequences, ShortConvolution, describe_sequences
from deltazoo.layers.short_convolution import _can_join

CHANNELS = 6
DOCUMENTS = [[5, 1, 0, 2, 7], [3], [1, 1, 1], [0, 4], [4, 0], [2, 0, 0, 3]]


def convolution(kernel_size: int = 4, dtype: torch.dtype = torch.float64) -> ShortConvolution:
    layer = ShortConvolution(CHANNELS, kernel_size).to(dtype)
    torch.nn.init.normal_(layer.weight)
    return layer


def by_conv1d(x: Tensor, weight: Tensor) -> Tensor:
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight, groups=x.shape[-1])).transpose(1, 2)


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 7])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 9])
def test_equals_conv1d_with_gradients(kernel_size: int, num_tokens: int) -> None:
    layer = convolution(kernel_size)
    x = torch.randn(2, num_tokens, CHANNELS, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x)[0], by_conv1d(x, layer.weight)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)
    seed = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(actual, (x, layer.weight), seed),
        torch.autograd.grad(expected, (x, layer.weight), seed),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("cut", range(1, 7))
def test_state_carries_over_any_cut(cut: int) -> None:
    layer = convolution()
    x = torch.randn(2, 7, CHANNELS, dtype=torch.float64)
    whole, last = layer(x)
    first, state = layer(x[:, :cut])
    rest, final = layer(x[:, cut:], state)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, rtol=0, atol=1e-14)
    assert torch.equal(final, last)
    assert torch.equal(last, x[:, -3:].transpose(1, 2))


def test_state_before_the_window_is_full_is_led_by_zeros() -> None:
    layer = convolution()
    x = torch.randn(1, 1, CHANNELS, dtype=torch.float64)
    state = layer(x)[1]
    assert torch.equal(state, F.pad(x.transpose(1, 2), (2, 0)))


@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences_equal_separate_ones(lengths: list[int], with_state: bool, poisoned_empty: None) -> None:
    layer = convolution()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(1, sum(lengths), CHANNELS, dtype=torch.float64)
    state = torch.randn(len(lengths), CHANNELS, 3, dtype=torch.float64) if with_state else None
    packed, last = layer(x, state, describe_sequences(1, sum(lengths), cu_seqlens=bounds))
    for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        alone, alone_last = layer(x[:, start:stop], None if state is None else state[n : n + 1])
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=0, atol=1e-14)
        assert torch.equal(last[n : n + 1], alone_last)


def test_gradients_never_cross_a_document_boundary() -> None:
    layer = convolution()
    x = torch.randn(1, 12, CHANNELS, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x, None, describe_sequences(1, 12, cu_seqlens=torch.tensor([0, 5, 7, 12])))
    (gradient,) = torch.autograd.grad(y[:, 5:7].sum(), x)
    assert gradient[:, 5:7].abs().min() > 0
    assert gradient[:, :5].abs().max() == 0 and gradient[:, 7:].abs().max() == 0


def test_gradient_of_the_final_state_of_a_short_document_reaches_its_past() -> None:
    layer = convolution()
    x = torch.randn(1, 1, CHANNELS, dtype=torch.float64)
    state = torch.randn(1, CHANNELS, 3, dtype=torch.float64, requires_grad=True)
    _, last = layer(x, state, describe_sequences(1, 1, cu_seqlens=torch.tensor([0, 1])))
    (gradient,) = torch.autograd.grad(last.sum(), state)
    assert torch.equal(gradient[0, 0], torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))


def test_state_of_a_padded_row_ends_with_its_last_real_tokens() -> None:
    layer = convolution()
    sequences = PaddedSequences.from_mask(torch.tensor([[0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]))
    x = torch.randn(3, 6, CHANNELS, dtype=torch.float64)
    before = torch.randn(3, CHANNELS, 3, dtype=torch.float64)
    _, last = layer(sequences.arrange(x), before, sequences)
    assert torch.equal(last[0], x[0, [1, 3, 4]].T)
    assert torch.equal(last[1], before[1])
    assert torch.equal(last[2], x[2, 3:].T)


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_full_backward_hook"])
def test_convolutions_that_something_watches_are_called_apart(kind: str) -> None:
    layers, x = [convolution() for _ in range(3)], torch.randn(1, 5, CHANNELS)
    assert _can_join(layers, x)
    getattr(layers[1], kind)(lambda *args: None)
    assert not _can_join(layers, x)


def test_half_precision_sums_in_float32() -> None:
    layer = convolution(dtype=torch.bfloat16)
    x = torch.randn(2, 9, CHANNELS, dtype=torch.bfloat16)
    expected = by_conv1d(x.double(), layer.weight.double()).to(torch.bfloat16)
    y, state = layer(x)
    assert y.dtype == state.dtype == torch.bfloat16
    # Equal up to values on the edge between two roundings.
    torch.testing.assert_close(y, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=0)


@pytest.mark.parametrize("shape", [(2, CHANNELS, 2), (1, CHANNELS, 3), (2, CHANNELS + 1, 3), (2, 3, CHANNELS)])
def test_a_state_of_the_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must have shape \(2, 6, 3\), got"):
        convolution()(torch.randn(2, 4, CHANNELS, dtype=torch.float64), torch.zeros(shape))


def test_a_convolution_without_taps_is_refused() -> None:
    for taps in (0, True):
        with pytest.raises(ValueError, match=f"kernel_size={taps}"):
            ShortConvolution(CHANNELS, taps)
