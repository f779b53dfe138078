"""Bits per byte with bootstrap intervals over files, and the rule that calls a difference."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from experiments.runner import Line

_RESAMPLES = 10_000
_LEVEL = 0.95


class Interval(NamedTuple):
    """A value and the bounds that hold 95% of its bootstrap resamples."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def bits_per_byte(line: Line, length: int) -> float:
    """Of all scored held-out bytes in rows of a length."""
    return interval([line], length).value


def interval(lines: Sequence[Line], length: int, minus: Sequence[Line] = ()) -> Interval:
    """Bits per byte of some seeds, their mean, less those of others, over resamples of the held-out files."""
    bits, size = _bits_of_files(lines, length)
    if minus:
        bits = bits - _bits_of_files(minus, length)[0]
    weights = _resamples(len(bits))
    ratios = (weights @ bits) / (weights @ size)
    low, high = np.quantile(ratios, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Interval(float(bits.sum() / size.sum()), float(low), float(high))


def is_called(difference: Interval, spread: float | None) -> bool:
    """Whether a difference counts: 95% of the resamples have its sign, and it is larger than seeds differ."""
    if spread is None:
        return False
    return (difference.low > 0 or difference.high < 0) and abs(difference.value) > spread


def seed_spread(groups: Sequence[Sequence[Line]], length: int) -> float | None:
    """The largest difference in bits per byte between two seeds of one group; None while none has two."""
    found = [[bits_per_byte(line, length) for line in group] for group in groups]
    return max((max(bits) - min(bits) for bits in found if len(bits) > 1), default=None)


def _bits_of_files(lines: Sequence[Line], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Bits and bytes of each held-out file that is scored; bits are the mean of the lines."""
    size = np.array(lines[0]["file_bytes"], dtype=np.float64)
    nats = np.mean([line["scores"][str(length)]["file_nats"] for line in lines], axis=0)
    return nats[size > 0] / math.log(2), size[size > 0]


@lru_cache(maxsize=2)
def _resamples(files: int) -> np.ndarray:
    """`[resamples, files]`: how often each file is drawn; the same for all intervals."""
    return np.random.default_rng(0).multinomial(files, np.full(files, 1 / files), size=_RESAMPLES).astype(np.float64)
