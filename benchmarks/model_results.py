"""Rows and result files of the whole-model benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from benchmarks.result_files import MeasuredRow, Results

__all__ = ["MEASURES", "ModelResults", "ModelRow"]

MEASURES = {
    "first_step_s": "first training step of a fresh model, compilation included",
    "train_tok_s": "training tokens per second: forward, backward, clipping, AdamW",
    "train_peak_gib": "peak memory of such a step, model and optimizer included",
    "kept_kib": "KiB per token kept between forward and backward pass, logits included",
    "profile_ms": "time of one kind of work in a training step",
    "decode_tok_s": "new tokens per second, all rows together",
    "prefill_tok_s": "prompt tokens per second, in pieces",
    "token_ms": "one more token after a context",
    "context_peak_gib": "peak memory of prompt and further tokens, model included",
}


@dataclass(frozen=True)
class ModelRow(MeasuredRow):
    """One number about one model.

    `size` and `model` name an architecture, `library` whose code runs it and `way` how; `batch` rows of `tokens` tokens
    (prompt or context for decoding); `part` a kind of work, for profiles.
    """

    MEASURES: ClassVar[dict[str, str]] = MEASURES

    size: str
    model: str
    library: str
    way: str
    dtype: str
    batch: int
    tokens: int
    part: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured."""
        return (self.size, self.model, self.library, self.way, self.dtype, self.measure, self.batch, self.tokens,
                self.part)  # fmt: skip

    @property
    def name(self) -> str:
        """Model and library, for tables and legends."""
        return f"{self.model} ({self.library})"

    def about(self, measure: str, part: str = "") -> ModelRow:
        """The same settings for another measure."""
        return replace(self, measure=measure, part=part)


class ModelResults(Results[ModelRow]):
    """Numbers about models."""

    row_type = ModelRow
    kind = "a result of `deltazoo bench model`"

    def of(self, measure: str) -> list[ModelRow]:
        """All rows of a measure, in the order of their settings."""
        rows = [row for row in self.rows.values() if row.measure == measure]
        return sorted(rows, key=lambda row: (row.tokens, row.batch, row.library != "deltazoo", row.name, row.way))
