"""Filters keep what transformers' filters keep, draws follow the probabilities, and no row matters to another."""

import pytest
import torch
from decoding_loops import DEVICES
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from deltazoo.generation import Sampling
from deltazoo.generation.sampling import NO_TOKEN, Sampler, Way, uniform_numbers

SETTINGS = [
    Sampling(),
    Sampling(1.0),
    Sampling(0.5, top_k=3),
    Sampling(2.0, top_p=0.5),
    Sampling(1.5, top_k=20, top_p=0.9),
    Sampling(1.0, top_k=1000),
    Sampling(1.0, top_k=1),
    Sampling(0.9, top_p=1e-6),
]
NAN, INF = float("nan"), float("inf")


def sampler_of(settings, device="cpu", seeds=None, **ends):
    sampler = Sampler(len(settings), torch.device(device), **ends)
    for row, sampling in enumerate(settings):
        sampler.put(row, sampling, row if seeds is None else seeds[row])
    return sampler


def drawn(sampler, logits, position, way):
    token = torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)
    sampler.choose(logits, torch.full_like(token, position), way, token)
    return token[:, 0]


def warped(logits, sampling):
    logits = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    return TopPLogitsWarper(sampling.top_p)(None, logits) if sampling.top_p else logits


def test_ways():
    assert [Way.of(sampling) for sampling in SETTINGS] == [0, 1, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_filters_are_those_of_transformers(device):
    """For rows that each have their own; of equal logits as many are kept, at least one."""
    sampler = sampler_of(SETTINGS[1:], device)
    for seed in range(50):
        logits = 3 * torch.randn(len(SETTINGS) - 1, 40, generator=torch.Generator().manual_seed(seed)).to(device)
        dropped = sampler._dropped(logits)
        expected = torch.cat([warped(logits[i : i + 1], sampling) for i, sampling in enumerate(SETTINGS[1:])])
        assert torch.equal(dropped, expected == -INF)
    equal = torch.zeros(len(logits), 8, device=device)
    kept = [warped(equal[:1], sampling).isfinite().sum().item() for sampling in SETTINGS[1:]]
    assert (~sampler._dropped(equal)).sum(-1).tolist() == kept


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampling", SETTINGS[1:], ids=str)
def test_draws_have_the_distribution(sampling, device):
    """The total variation between 20,000 draws and the probabilities is that of independent draws."""
    count = 20_000
    sampler = sampler_of([sampling] * count, device, seeds=range(count))
    logits = 2 * torch.randn(1, 40, generator=torch.Generator().manual_seed(1)).to(device)
    made = drawn(sampler, logits.expand(count, -1), 5, Way.of(sampling))
    expected = warped(logits, sampling)[0].softmax(-1)
    observed = made.bincount(minlength=40) / count
    assert not observed[expected == 0].any()
    # The expected distance of independent draws is at most sum(sqrt(p / count)) / sqrt(2 pi).
    assert 0.5 * (observed - expected).abs().sum() < (expected / count).sqrt().sum()


@pytest.mark.parametrize("device", DEVICES)
def test_other_rows_and_more_ways_change_nothing(device):
    logits = torch.randn(len(SETTINGS), 300, device=device)
    together = drawn(sampler_of(SETTINGS, device), logits, 9, Way.FILTERED)
    for row, sampling in enumerate(SETTINGS):
        alone = sampler_of([sampling], device, seeds=[row])
        for way in Way:
            if way >= Way.of(sampling):
                assert drawn(alone, logits[row : row + 1], 9, way).item() == together[row]
    assert together[0] == logits[0].argmax() and together[6] == logits[6].argmax()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", [NAN, INF, -INF])
def test_a_row_without_a_likeliest_token_has_none_and_others_have_theirs(fault, device):
    """NaN or +inf anywhere, or nothing but -inf; a few -inf are tokens that are ruled out."""
    logits = torch.randn(2 * len(SETTINGS), 300, device=device)
    logits[:, 3] = -INF
    sampler = sampler_of(SETTINGS * 2, device)
    for way in Way:
        expected = drawn(sampler, logits, 9, way)
        broken = logits.clone()
        broken[::2, 100 if fault != -INF else slice(None)] = fault
        made = drawn(sampler, broken, 9, way)
        assert (made[::2] == NO_TOKEN).all() and torch.equal(made[1::2], expected[1::2])
        assert not (expected == 3).any() and (expected >= 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_have_ended_get_padding(device):
    """The first ends now and the second has ended, the third is at NaN, the fourth goes on."""
    logits = torch.full((4, 50), -1.0, device=device)
    logits[0, 7] = logits[1, 8] = logits[3, 9] = 30
    logits[2] = logits[1, 0] = NAN
    for way in Way:
        sampler = sampler_of([Sampling(float(way > 0))] * 4, device, ends=[4, 7], pad=5)
        sampler.finished[1] = True
        assert drawn(sampler, logits, 3, way).tolist() == [7, 5, NO_TOKEN, 9]
        assert sampler.finished.flatten().tolist() == [True, True, False, False]
        assert drawn(sampler, logits, 4, way).tolist() == [5, 5, NO_TOKEN, 9]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-39, 1e-46])
def test_the_lowest_temperatures_take_the_likeliest(temperature, filters, device):
    logits = 30 * torch.randn(10, 300, device=device)
    made = drawn(sampler_of([Sampling(temperature, **filters)] * 10, device), logits, 9, Way.FILTERED)
    assert torch.equal(made, logits.argmax(-1))


def test_values_beyond_those_of_tensors():
    """All tokens that the model allows are as likely, and all are kept."""
    logits = torch.randn(20_000, 6, generator=torch.Generator().manual_seed(0))
    logits[:, 3] = -INF
    made = drawn(sampler_of([Sampling(1e300, top_k=2**70)] * 20_000), logits, 9, Way.FILTERED)
    counts = made.bincount(minlength=6)
    assert counts[3] == 0 and (counts[[0, 1, 2, 4, 5]] - 4000).abs().max() < 5 * 3200**0.5


@pytest.mark.parametrize("top_p", [1e-13, 1e-300])
def test_a_very_low_top_p_keeps_the_likeliest_token(top_p):
    logits = torch.randn(4, 300)
    made = drawn(sampler_of([Sampling(1.0, top_p=top_p)] * 4), logits, 9, Way.FILTERED)
    assert torch.equal(made, logits.argmax(-1))


def test_rows_move():
    sampler = sampler_of(SETTINGS)
    logits = torch.randn(1, 50).expand(len(SETTINGS), -1)
    before = drawn(sampler, logits, 3, Way.FILTERED)
    sampler.move([4, 3], [0, 1])
    assert torch.equal(drawn(sampler, logits, 3, Way.FILTERED), before[[4, 3, *range(2, len(SETTINGS))]])


def test_numbers_are_uniform_and_independent():
    seeds = torch.tensor([[0], [1], [2**40], [-1], [-(2**63)]])
    numbers = torch.stack(
        [uniform_numbers(seeds, torch.full_like(seeds, position), 20_000) for position in (0, 1, 2**20)]
    ).flatten(0, 1)
    assert numbers.min() > 0 and numbers.max() < 1 and numbers.dtype == torch.float32
    assert (numbers.mean(1) - 0.5).abs().max() < 5 * (1 / 12 / 20_000) ** 0.5
    bins = torch.stack([(row * 16).long().bincount(minlength=16) for row in numbers])
    assert ((bins - 1250) ** 2 / 1250).sum(1).max() < 45, "chi-square with 15 degrees of freedom"
    correlations = torch.corrcoef(numbers)
    assert (correlations - torch.eye(len(numbers))).abs().max() < 5 / 20_000**0.5
    neighbours = torch.stack([torch.corrcoef(torch.stack([row[1:], row[:-1]]))[0, 1] for row in numbers])
    assert neighbours.abs().max() < 5 / 20_000**0.5
    assert torch.equal(uniform_numbers(seeds, torch.zeros_like(seeds), 10), numbers[:5, :10]), "any count has the same"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": float("inf")}, "temperature must be 0 .* or more, got inf"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be at least 1, got 0"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be above 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_k": 5}, "temperature=0 makes none"),
    ],
)
def test_values_out_of_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)
