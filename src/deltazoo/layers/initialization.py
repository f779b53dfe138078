"""Initial values of parameters, as in the papers. Each function fills one tensor in place, also on the meta device."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Initializer = Callable[[Tensor], object]

DECAY_TIMES = (8.0, 4096.0)
"""Tokens after which the fastest and the slowest decay of a layer that replaces softmax attention have lost all but 1/e
of what they held."""


def decay_rate_(A_log: Tensor, rate_range: tuple[float, float]) -> None:
    """Fill `A_log` so that its exponential is uniform on (low, high].

    The range is (0, 16] in arXiv:2412.06464, (1, 16] in arXiv:2405.21060 and 2510.26692.
    """
    low, high = rate_range
    # rand is in [0, 1), so the rate never is `low` itself: log(0) would switch the head's decay off for good.
    with torch.no_grad():
        A_log.copy_(torch.log(high - (high - low) * torch.rand_like(A_log)))


def log_uniform_step_(dt_bias: Tensor, dt_range: tuple[float, float]) -> None:
    """Fill `dt_bias` so that its softplus is log-uniform on the range (arXiv:2405.21060)."""
    low, high = map(math.log, dt_range)
    with torch.no_grad():
        dt = torch.exp(low + (high - low) * torch.rand_like(dt_bias))
        dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def spaced_decay_rates(number: int) -> Tensor:
    """Decay rates `[number]` per token whose time constants are spaced evenly in the logarithm over `DECAY_TIMES`."""
    low, high = map(math.log, DECAY_TIMES)
    return torch.exp(-torch.linspace(low, high, number)) if number > 1 else torch.tensor([1 / DECAY_TIMES[1]])


def nearly_zero_rows_(weight: Tensor) -> None:
    """Fill rows with vectors of length 1e-4 in random directions, the same at every call.

    A linear map with such rows has almost no effect. They are not zero because DoRA divides by the length of a row.
    """
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    with torch.no_grad():
        weight.copy_(1e-4 * nn.functional.normalize(noise, dim=-1))
