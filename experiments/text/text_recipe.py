"""Sizes and schedule, the same for all configurations: fixed before the first of them was trained."""

import math
from collections.abc import Mapping
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
    """Peak learning rates, of which successive halving (arXiv:1502.07943) finds the best for each configuration."""
    rungs: tuple[int, ...] = (256, 512)
    """Steps of the training after which the worst rate is dropped, until one is left, which is trained to the end."""
    judged_steps: int = 64
    """Steps before a rung whose mean loss judges a rate."""
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
        for name in ("parameters", "hidden_size", "num_layers", "row_length", "rows_per_step", "steps", "judged_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}")
        if not self.rates or min(self.rates) <= 0:
            raise ValueError(f"rates must be positive, got {self.rates}")
        if len(self.rates) < 2 or len(self.rungs) != len(self.rates) - 1:
            raise ValueError(f"two rates or more, and a rung for each but one of them: got {self.rates}, {self.rungs}")
        if not self.judged_steps <= self.rungs[0] or list(self.rungs) != sorted({*self.rungs, self.steps})[:-1]:
            raise ValueError(
                f"rungs must rise from judged_steps={self.judged_steps} to below steps={self.steps}, got {self.rungs}"
            )
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

    def standing(self, losses: Mapping[tuple[float, int], float]) -> tuple[list[float], int | None]:
        """The learning rates that are not out, and the rung at which they are judged next.

        Args:
            losses: by (rate, rung); infinite where the loss was not finite, before the rung or after the last one.

        Returns:
            The rates, none of them if no loss is finite, and the rung, None after the last one.
        """
        rates = list(self.rates)
        for place, rung in enumerate(self.rungs, start=1):
            if len(rates) > 1 and any((rate, rung) not in losses for rate in rates):
                return rates, rung
            found = {rate: losses.get((rate, rung), 0.0) for rate in rates}
            rates = sorted((rate for rate in rates if math.isfinite(found[rate])), key=found.__getitem__)
            rates = rates[: len(self.rates) - place]
        return rates, None

    def as_json(self) -> dict[str, Any]:
        """The fields as a JSON file has them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TextRecipe":
        """Back from what `as_json` made."""
        kept: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**kept)
