"""Filters keep the tokens that transformers' filters keep, and draws follow the probabilities."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from deltazoo.generation import Sampling
from deltazoo.generation.sampling import NO_TOKEN


def warped(logits, sampling):
    logits = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    return TopPLogitsWarper(sampling.top_p)(None, logits) if sampling.top_p else logits


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.3, top_k=1),
        Sampling(1.0, top_k=1000),
        Sampling(0.9, top_p=0.5),
        Sampling(1.0, top_p=1e-6),
        Sampling(2.0, top_k=20, top_p=0.8),
    ],
    ids=str,
)
def test_filters_are_those_of_transformers(sampling):
    logits = 3 * torch.randn(50, 40)
    assert torch.equal(sampling.filter(logits), warped(logits, sampling))


def test_equal_logits_leave_at_least_one_token():
    assert Sampling(1.0, top_p=0.01).filter(torch.zeros(1, 8)).isfinite().sum() == 1


def test_draws_follow_the_probabilities():
    """Five standard deviations of a count, in 20,000 draws."""
    sampling, draws = Sampling(0.5, top_k=3), 20_000
    logits = torch.tensor([0.3, -0.2, 1.0, 0.9, -3.0])
    probabilities = sampling.filter(logits[None]).softmax(-1)[0]
    chosen = sampling.choose(logits.expand(draws, -1), torch.Generator().manual_seed(0))
    counts = chosen.bincount(minlength=5).double()
    deviation = (draws * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - draws * probabilities).abs() <= 5 * deviation).all()


def test_zero_temperature_takes_the_likeliest():
    logits = torch.randn(10, 30)
    assert torch.equal(Sampling().choose(logits), logits.argmax(-1))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.7), Sampling(1.0, top_k=3), Sampling(2.0, top_p=0.9)], ids=str
)
def test_rows_without_a_likeliest_token_have_none(sampling):
    """NaN anywhere, +inf, or nothing but -inf; a few -inf are tokens that are ruled out."""
    logits = torch.randn(6, 30)
    logits[0, 7] = logits[1, 0] = NAN
    logits[2, 29] = INF
    logits[3] = -INF
    logits[4, 3:] = -INF
    found = sampling.choose(logits, torch.Generator().manual_seed(0))
    assert found[:4].tolist() == [NO_TOKEN] * 4
    assert 0 <= found[4] < 3 and 0 <= found[5] < 30


@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 1e-46])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
def test_the_lowest_temperatures_take_the_likeliest(temperature, filters):
    logits = 20 * torch.randn(10, 30)
    assert torch.equal(Sampling(temperature, **filters).choose(logits), logits.argmax(-1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be at least 1, got 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be above 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_k": 5}, "temperature=0 makes none"),
    ],
)
def test_values_out_of_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)
