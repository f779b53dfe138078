"""Sizes and schedule, the same for all configurations: fixed before the first of them was trained."""

import math
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["TextRecipe"]


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """How every configuration is built, trained and scored. Lengths are in tokens."""

    parameters: int = 50_000_000
    """Of a model, embedding included. The MLP's width makes up for what a mixer has more or less than others."""
    hidden_size: int = 640
    num_layers: int = 8
    num_heads: int = 5
    """Of 128 channels with these widths, in keys, queries and values, so that all states have one size."""
    softmax_every: int = 4
    """Hybrids have softmax attention in every fourth block."""
    width_multiple: int = 32
    """Of the MLP."""

    row_length: int = 4096
    rows_per_step: int = 32
    steps: int = 1536
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    """Peak learning rates, of which trials find the best for each configuration."""
    trial_steps: int = 128
    """Of each trial, with a schedule of its own."""
    trial_judged: float = 0.25
    """Share of a trial's steps, the last ones, whose mean loss judges it."""
    warmup: float = 0.08
    final_rate: float = 0.1
    """Over the peak, at the end of the cosine."""
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    scored_lengths: tuple[int, ...] = (4096, 16384, 65536)
    """Lengths of the rows into which the held-out stream is cut: that of training, 4 times and 16 times it."""
    decode_batches: tuple[int, ...] = (1, 64)
    decode_context: int = 4096
    decode_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("parameters", "hidden_size", "num_layers", "row_length", "rows_per_step", "steps", "trial_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}")
        if not self.rates or min(self.rates) <= 0:
            raise ValueError(f"rates must be positive, got {self.rates}")
        if self.row_length not in self.scored_lengths:
            raise ValueError(f"scored_lengths must contain row_length={self.row_length}, got {self.scored_lengths}")
        if any(longer % shorter for shorter, longer in zip(self.scored_lengths, self.scored_lengths[1:], strict=False)):
            raise ValueError(f"each of scored_lengths must divide the next, got {self.scored_lengths}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step."""
        return self.rows_per_step * self.row_length

    @property
    def tokens(self) -> int:
        """Tokens of a whole training."""
        return self.steps * self.tokens_per_step

    def rate_factor(self, step: int, steps: int) -> float:
        """Learning rate over its peak at `step` (from 0) of `steps`: linear warm-up, then a cosine."""
        warmup = max(1, round(self.warmup * steps))
        if step < warmup:
            return (step + 1) / warmup
        done = (step + 1 - warmup) / max(1, steps - warmup)
        return self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * done)) / 2

    def as_json(self) -> dict[str, Any]:
        """The fields as a JSON file has them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
