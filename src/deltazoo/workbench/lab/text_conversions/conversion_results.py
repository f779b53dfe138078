"""Result files of the suite: one JSON line per trained softmax model and per conversion."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltazoo.workbench.lab.lab_records import Environment
from deltazoo.workbench.lab.text.results import append_line, check_header, read_header, read_lines
from deltazoo.workbench.lab.text_conversions.conversion_recipe import Conversion, ConversionRecipe

__all__ = ["SUITE", "ConversionResult", "ConversionResults", "Measured", "TeacherResult"]

SUITE = "text-conversions"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is measured of the softmax model and of every converted one."""

    teacher: str
    """Digest of the softmax model's weights: only conversions of one model compare."""
    parameters: int
    scores: dict[str, dict[str, Any]]
    """By row length: `LengthScore.as_json()`."""
    state_bytes: dict[str, int]
    """By tokens of context."""
    decoding: dict[str, dict[str, Any]]
    """By tokens of context: `tokens_per_second` or `error`, and on a GPU `peak_bytes` beside the weights."""
    seconds: float
    """Of everything."""
    environment: Environment
    date: str


@dataclass(frozen=True, kw_only=True)
class TeacherResult(Measured):
    """The softmax model."""

    training: dict[str, Any]
    """As `deltazoo.workbench.lab.text_conversions.teacher.Teacher`."""


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


class ConversionResults:
    """The results of one recipe on one corpus, to which conversions are added.

    Args:
        path: of the JSON lines; need not exist.
        recipe: of the conversions to come.
        corpus_digest: of their text.
        file_bytes: scored bytes of the held-out files.

    Raises:
        ValueError: the file holds results of another recipe or corpus, or something else.
    """

    def __init__(self, path: Path, recipe: ConversionRecipe, corpus_digest: str, file_bytes: list[int]) -> None:
        self.path = path
        self.header = {
            "suite": SUITE,
            "recipe": json.loads(json.dumps(recipe.as_json())),
            "corpus": corpus_digest,
            "file_bytes": file_bytes,
        }
        self.teachers: dict[str, TeacherResult] = {}
        self.conversions: dict[Conversion, ConversionResult] = {}
        if path.exists() and path.stat().st_size:
            self._read()
            check_header(path, self.header)

    @classmethod
    def read(cls, path: Path) -> "ConversionResults":
        """The results of a file, whatever their recipe.

        Raises:
            ValueError: the file holds something else.
        """
        results = cls.__new__(cls)
        results.path, results.header = path, read_header(path, SUITE)
        results.teachers, results.conversions = {}, {}
        results._read()
        return results

    @property
    def recipe(self) -> ConversionRecipe:
        """Of these results."""
        return ConversionRecipe.from_json(self.header["recipe"])

    def add(self, result: TeacherResult | ConversionResult) -> None:
        """Keep a result; it is on disk when this returns."""
        kind = "teacher" if isinstance(result, TeacherResult) else "conversion"
        append_line(self.path, self.header, {"kind": kind, **asdict(result)})
        self._keep(result)

    def teacher_of(self, result: ConversionResult) -> TeacherResult:
        """The softmax model that was converted."""
        return self.teachers[result.teacher]

    def _read(self) -> None:
        for number, line in read_lines(self.path):
            try:
                content = json.loads(line)
                kind = content.pop("kind")
                content["environment"] = Environment(**content["environment"])
                if kind == "teacher":
                    self._keep(TeacherResult(**content))
                else:
                    content["points"] = [tuple(point) for point in content["points"]]
                    self._keep(ConversionResult(**content))
                    if content["teacher"] not in self.teachers:
                        raise ValueError(f"its softmax model {content['teacher']} has no line before it")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number} is not a result of this suite: {error}") from error

    def _keep(self, result: TeacherResult | ConversionResult) -> None:
        if isinstance(result, TeacherResult):
            self.teachers[result.teacher] = result
        else:
            self.conversions[result.conversion] = result
