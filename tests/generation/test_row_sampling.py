"""Sampling row by row: filters and draws are those of `Sampling`, and no row matters to another."""

import pytest
import torch

from deltazoo.generation import Sampling
from deltazoo.generation.row_sampling import RowSampling, Way, uniform_numbers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SETTINGS = [
    Sampling(),
    Sampling(1.0),
    Sampling(0.5, top_k=3),
    Sampling(2.0, top_p=0.6),
    Sampling(1.5, top_k=20, top_p=0.9),
    Sampling(1.0, top_k=1000),
    Sampling(1.0, top_k=1),
]


def rows_of(settings, device="cpu", seeds=None):
    rows = RowSampling(len(settings), torch.device(device))
    for row, sampling in enumerate(settings):
        rows.put(row, sampling, row if seeds is None else seeds[row])
    return rows


def chosen(rows, logits, position, way):
    token = torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)
    rows.choose(logits, torch.full_like(token, position), way, token)
    return token[:, 0]


def test_ways():
    assert [Way.of(sampling) for sampling in SETTINGS] == [0, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_filters(device):
    rows = rows_of(SETTINGS[1:], device)
    logits = torch.randn(len(SETTINGS) - 1, 50, device=device)
    logits[:, 7] = logits[:, 3]  # equal ones
    filtered = rows._filter(logits / rows.temperature)
    for row, sampling in enumerate(SETTINGS[1:]):
        expected = sampling.filter(logits[row : row + 1])
        assert torch.equal(filtered[row : row + 1].isfinite(), expected.isfinite())
        exact = {"rtol": 0, "atol": 0} if device == "cpu" else {}  # a GPU divides by a number otherwise
        torch.testing.assert_close(filtered[row : row + 1], expected, **exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampling", SETTINGS[1:])
def test_draws_have_the_distribution(sampling, device):
    """The total variation between 20,000 draws and the probabilities is that of independent draws."""
    count = 20_000
    rows = rows_of([sampling] * count, device, seeds=range(count))
    logits = 2 * torch.randn(1, 40, generator=torch.Generator().manual_seed(1)).to(device)
    made = chosen(rows, logits.expand(count, -1), 5, Way.of(sampling))
    expected = sampling.filter(logits)[0].softmax(-1)
    observed = made.bincount(minlength=40) / count
    assert not observed[expected == 0].any()
    # The expected distance of independent draws is at most sum(sqrt(p / count)) / sqrt(2 pi).
    assert 0.5 * (observed - expected).abs().sum() < (expected / count).sqrt().sum()


@pytest.mark.parametrize("device", DEVICES)
def test_other_rows_and_more_ways_change_nothing(device):
    logits = torch.randn(len(SETTINGS), 300, device=device)
    together = chosen(rows_of(SETTINGS, device), logits, 9, Way.FILTERED)
    for row, sampling in enumerate(SETTINGS):
        alone = rows_of([sampling], device, seeds=[row])
        for way in Way:
            if way >= Way.of(sampling):
                assert chosen(alone, logits[row : row + 1], 9, way).item() == together[row]
    assert together[0] == logits[0].argmax() and together[6] == logits[6].argmax()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", ["nan", "inf", "-inf"])
def test_a_row_of_nan_has_no_token_and_others_have_theirs(fault, device):
    logits = torch.randn(2 * len(SETTINGS), 300, device=device)
    rows = rows_of(SETTINGS * 2, device)
    for way in Way:
        expected = chosen(rows, logits, 9, way)
        broken = logits.clone()
        broken[::2, 100 if fault != "-inf" else slice(None)] = float(fault)
        made = chosen(rows, broken, 9, way)
        assert (made[::2] == -1).all() and torch.equal(made[1::2], expected[1::2])


@pytest.mark.parametrize("top_p", [1e-13, 1e-300])
def test_a_very_low_top_p_keeps_the_likeliest_token(top_p):
    logits = torch.randn(4, 300)
    made = chosen(rows_of([Sampling(1.0, top_p=top_p)] * 4), logits, 9, Way.FILTERED)
    assert torch.equal(made, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-30, 1e-45])
def test_very_low_temperatures_are_greedy(temperature):
    logits = 30 * torch.randn(1, 300)
    for way in (Way.DRAWN, Way.FILTERED):
        assert chosen(rows_of([Sampling(temperature, top_p=0.9)]), logits, 9, way) == logits.argmax()


def test_rows_move():
    rows = rows_of(SETTINGS)
    logits = torch.randn(1, 50).expand(len(SETTINGS), -1)
    before = chosen(rows, logits, 3, Way.FILTERED)
    rows.move([4, 3], [0, 1])
    assert torch.equal(chosen(rows, logits, 3, Way.FILTERED), before[[4, 3, 2, 3, 4, 5, 6]])


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


def test_numbers_do_not_depend_on_how_many_there_are():
    seed, position = torch.tensor([[7]]), torch.tensor([[3]])
    assert torch.equal(uniform_numbers(seed, position, 10), uniform_numbers(seed, position, 100)[:, :10])
