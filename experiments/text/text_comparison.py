"""Bits per byte of configurations with bootstrap intervals over files, and the rule that calls a difference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from experiments.text.results import TextResult, TextResults

__all__ = [
    "Difference",
    "Interval",
    "bits_per_byte",
    "compare",
    "interval",
    "length_gain",
    "ratio_interval",
    "seed_spread",
]

RESAMPLES = 10_000
LEVEL = 0.95
_SEED = 0


@dataclass(frozen=True)
class Interval:
    """A value and the bounds that hold 95% of its bootstrap resamples."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True)
class Difference:
    """Bits per byte of one configuration minus those of another."""

    interval: Interval
    spread: float | None
    """As `seed_spread`."""

    @property
    def called(self) -> bool:
        """Whether it counts: 95% of the resamples have its sign, and it is larger than seeds differ."""
        if self.spread is None:
            return False
        same_sign = self.interval.low > 0 or self.interval.high < 0
        return same_sign and abs(self.interval.value) > self.spread


def bits_per_byte(result: TextResult, results: TextResults, length: int | None = None) -> float:
    """Of all scored held-out bytes in rows of a length, by default the training's."""
    nats, size = _file_sums([result], results, length)
    return float(nats.sum() / size.sum())


def interval(configuration: str, results: TextResults, length: int | None = None) -> Interval:
    """Bits per byte of a configuration, the mean of its seeds, over resamples of the held-out files.

    Raises:
        ValueError: the configuration has no result.
    """
    nats, size = _file_sums(_of(configuration, results), results, length)
    return ratio_interval(nats, size)


def compare(configuration: str, other: str, results: TextResults, length: int | None = None) -> Difference:
    """A configuration beside another on the same resamples of files, the mean of each one's seeds.

    Raises:
        ValueError: one of them has no result.
    """
    nats, size = _file_sums(_of(configuration, results), results, length)
    other_nats, _ = _file_sums(_of(other, results), results, length)
    return Difference(ratio_interval(nats - other_nats, size), seed_spread(results))


def length_gain(configuration: str, results: TextResults, length: int) -> Interval:
    """Bits per byte of the same text in rows of a length, minus those in rows of the training length.

    Raises:
        ValueError: the configuration has no result.
    """
    of_seeds = _of(configuration, results)
    longer, size = _file_sums(of_seeds, results, length)
    trained, _ = _file_sums(of_seeds, results, None)
    return ratio_interval(longer - trained, size)


def seed_spread(results: TextResults) -> float | None:
    """The largest difference in bits per byte between two seeds of one configuration; None while none has two."""
    spreads = []
    for configuration in {configuration for configuration, _ in results.configurations}:
        found = [bits_per_byte(result, results) for result in results.of_configuration(configuration)]
        if len(found) > 1:
            spreads.append(max(found) - min(found))
    return max(spreads, default=None)


def _of(configuration: str, results: TextResults) -> list[TextResult]:
    found = results.of_configuration(configuration)
    if not found:
        raise ValueError(f"there is no result of the configuration {configuration!r}")
    return found


def _file_sums(
    of_seeds: Sequence[TextResult], results: TextResults, length: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Bits and bytes of each held-out file that is scored; bits are the mean of the seeds."""
    size = np.array(results.header["file_bytes"], dtype=np.float64)
    key = str(length or results.header["recipe"]["row_length"])
    nats = np.mean([result.scores[key]["file_nats"] for result in of_seeds], axis=0)
    scored = size > 0
    return nats[scored] / math.log(2), size[scored]


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray) -> Interval:
    """The ratio of two sums over files `[files]`, over the resamples that all intervals share."""
    weights = _resamples(len(numerators))
    ratios = (weights @ numerators) / (weights @ denominators)
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(numerators.sum() / denominators.sum()), float(low), float(high))


@lru_cache(maxsize=2)
def _resamples(files: int) -> np.ndarray:
    """`[resamples, files]`: how often each file is drawn."""
    return np.random.default_rng(_SEED).multinomial(files, np.full(files, 1 / files), size=RESAMPLES).astype(np.float64)
