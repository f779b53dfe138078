"""Result files of the suite: one JSON line per trained softmax model, conversion and measurement of decoding."""

from dataclasses import dataclass
from typing import Any, ClassVar

from experiments.lab_records import Environment
from experiments.text.results import SuiteResults
from experiments.text_conversions.conversion_recipe import Conversion, ConversionRecipe

__all__ = ["SUITE", "ConversionResult", "ConversionResults", "DecodingResult", "Measured", "TeacherResult"]

SUITE = "text-conversions"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is measured of the softmax model and of every converted one."""

    teacher: str
    """Digest of the softmax model's weights: only conversions of one model compare."""
    parameters: int
    scores: dict[str, dict[str, Any]]
    """By row length: `LengthScore.as_json()`."""
    seconds: float
    """Of everything."""
    environment: Environment
    date: str


@dataclass(frozen=True, kw_only=True)
class TeacherResult(Measured):
    """The softmax model."""

    training: dict[str, Any]
    """As `experiments.text_conversions.teacher.Teacher`."""


@dataclass(frozen=True, kw_only=True)
class ConversionResult(Measured):
    """A converted model."""

    rule: str
    layers: str
    seed: int
    swapped: list[int]
    transfer_nats: list[float]
    """Of each held-out file after the swap, before any training, in rows of the training length."""
    points: list[tuple[str, int, float]]
    """(stage, tokens read, bits per byte in rows of the training length)."""
    stage_seconds: dict[str, float]
    peak_bytes: int | None

    @property
    def conversion(self) -> Conversion:
        """Which one it is."""
        return Conversion(self.rule, self.layers, self.seed)


@dataclass(frozen=True, kw_only=True)
class DecodingResult:
    """How a model with swapped layers decodes, whatever its weights. A later line counts."""

    rule: str
    layers: str
    """Of the softmax model as it is: those of `CONTROL`."""
    state_bytes: dict[str, int]
    """By tokens of context."""
    decoding: dict[str, dict[str, Any]]
    """By tokens of context: `tokens_per_second` or `error`, and on a GPU `peak_bytes` beside the weights."""
    environment: Environment
    date: str


class ConversionResults(SuiteResults):
    """The results of the suite `text-conversions`."""

    suite = SUITE
    kinds: ClassVar = {"teacher": TeacherResult, "conversion": ConversionResult, "decoding": DecodingResult}

    @property
    def recipe(self) -> ConversionRecipe:
        """Of these results."""
        return ConversionRecipe.from_json(self.header["recipe"])

    def teacher_of(self, result: ConversionResult) -> TeacherResult:
        """The softmax model that was converted."""
        return self.teachers[result.teacher]

    def _make_empty(self) -> None:
        self.teachers: dict[str, TeacherResult] = {}
        self.conversions: dict[Conversion, ConversionResult] = {}
        self.decodings: dict[Conversion, DecodingResult] = {}

    def _keep(self, result: TeacherResult | ConversionResult | DecodingResult) -> None:
        if isinstance(result, TeacherResult):
            self.teachers[result.teacher] = result
        elif isinstance(result, DecodingResult):
            self.decodings[Conversion(result.rule, result.layers)] = result
        elif result.teacher not in self.teachers:
            raise ValueError(f"its softmax model {result.teacher} has no line before it")
        else:
            self.conversions[result.conversion] = result
