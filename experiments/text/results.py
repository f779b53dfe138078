"""Result files of the suite: a JSON line per trial of a learning rate, training and measurement of costs."""

import fcntl
import json
import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from deltazoo.training.checkpoint_files import as_json
from experiments.lab_records import Environment
from experiments.text.text_recipe import TextRecipe

__all__ = [
    "CostResult",
    "Job",
    "SuiteResults",
    "TextResult",
    "TextResults",
    "Trial",
    "now",
]


@dataclass(frozen=True)
class Job:
    """A configuration to be trained: with seed 0 at several learning rates, with another one at the best of them."""

    configuration: str
    seed: int = 0
    costs: bool = False
    """It is trained, and its costs are to be measured."""

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.configuration}, {'costs' if self.costs else f'seed {self.seed}'}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a training with one of the learning rates has come to at a rung."""

    configuration: str
    rate: float
    rung: int
    """Steps done."""
    loss: float
    """Mean of the last steps, in nats per token; infinite where the loss, here or in the whole training at this rate,
    was not finite. A later line about the same rate and rung counts."""
    seconds: float
    """Of the training so far."""
    tokens_per_second: float
    environment: Environment
    date: str


@dataclass(frozen=True, kw_only=True)
class TextResult:
    """A configuration trained to the end with one learning rate, and scored."""

    configuration: str
    seed: int
    rate: float
    parameters: int
    intermediate_size: int
    curve: list[tuple[int, float]]
    """(step, mean training loss in nats per token)."""
    scores: dict[str, dict[str, Any]]
    """By row length: `LengthScore.as_json()`."""
    training_seconds: float
    tokens_per_second: float
    """On the card of this training, which may not be that of others: see `CostResult`."""
    seconds: float
    """Of this training and its scores; as long as decoding was measured right after a training, of that, too."""
    environment: Environment
    date: str


@dataclass(frozen=True, kw_only=True)
class CostResult:
    """How fast a configuration trains and decodes on a card, and the memory that it takes. A later line counts."""

    configuration: str
    training_steps: int
    """Steps of the training with the rate that was found, of which speed and memory are."""
    tokens_per_second: float
    """In training."""
    peak_bytes: int | None
    """In training; None on a CPU."""
    state_bytes: dict[str, int]
    """By tokens of context."""
    decoding: dict[str, dict[str, Any]]
    """As `experiments.text.decoding.decoding`."""
    environment: Environment
    date: str

    def decoding_speed(self, batch: int) -> float | None:
        """New tokens per second of so many rows together; None where there is no figure."""
        return self.decoding[str(batch)].get("tokens_per_second")

    def decoding_figure(self, batch: int) -> str:
        """Their speed as a table shows it, or why there is none."""
        speed = self.decoding_speed(batch)
        return self.decoding[str(batch)]["error"] if speed is None else f"{speed:,.0f}"


class SuiteResults(ABC):
    """The results of one recipe on one corpus, one JSON line each, to which more are added.

    The first line says which recipe and corpus.

    Args:
        path: of the JSON lines; need not exist.
        recipe: as of the trainings to come.
        corpus_digest: as of their text; None: of any text, to see what the file lacks and add nothing.
        file_bytes: scored bytes of the held-out files; None with `corpus_digest`.

    Raises:
        ValueError: the file holds results of another recipe or corpus, or something else.
    """

    suite: ClassVar[str]
    kinds: ClassVar[Mapping[str, type[Any]]]
    """What a line after the first one holds, by its key `kind`."""

    def __init__(
        self, path: Path, recipe: Any, corpus_digest: str | None = None, file_bytes: list[int] | None = None
    ) -> None:
        self.path = path
        self.header = {"suite": self.suite, "recipe": json.loads(json.dumps(recipe.as_json()))}
        if corpus_digest is not None:
            self.header |= {"corpus": corpus_digest, "file_bytes": file_bytes}
        self._make_empty()
        if path.exists() and "\n" in path.read_text(encoding="utf-8"):  # a first line that was cut is written anew
            self.reload()
            self.header = checked_header(path, self.header)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The results of a file, whatever their recipe; ValueError: the file holds something else."""
        results = cls.__new__(cls)
        results.path, results.header = path, read_header(path, cls.suite)
        results._make_empty()
        results.reload()
        return results

    def reload(self) -> None:
        """Take in what is in the file, to which other processes may have added."""
        for number, line in read_lines(self.path) if self.path.exists() else ():
            try:
                content = json.loads(line)
                kind = self.kinds[content.pop("kind")]
                content["environment"] = Environment(**content["environment"])
                if content.get("loss", ...) is None:
                    content["loss"] = math.inf
                for name in {"curve", "points"} & content.keys():
                    content[name] = [tuple(point) for point in content[name]]
                self._keep(kind(**content))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number} is not a result of this suite: {error}") from error

    def add(self, result: Any) -> None:
        """Keep a result; it is on disk when this returns."""
        assert "corpus" in self.header, "opened without its text, to look only"
        (kind,) = (kind for kind, made in self.kinds.items() if isinstance(result, made))
        append_line(self.path, self.header, {"kind": kind, **asdict(result)})
        self._keep(result)

    @abstractmethod
    def _make_empty(self) -> None:
        """Make the tables that results go into."""

    @abstractmethod
    def _keep(self, result: Any) -> None:
        """Put a result where it belongs."""


class TextResults(SuiteResults):
    """The results of the suite `text`."""

    suite = "text"
    kinds: ClassVar = {"trial": Trial, "configuration": TextResult, "costs": CostResult}

    def _make_empty(self) -> None:
        self.trials: dict[tuple[str, float, int], Trial] = {}
        self.trainings: dict[tuple[str, int, float], TextResult] = {}
        self.measured: dict[tuple[str, str], CostResult] = {}

    def _keep(self, result: Trial | TextResult | CostResult) -> None:
        if isinstance(result, Trial):
            self.trials[result.configuration, result.rate, result.rung] = result
        elif isinstance(result, TextResult):
            self.trainings[result.configuration, result.seed, result.rate] = result
        else:
            self.measured[result.environment.device, result.configuration] = result

    @cached_property
    def recipe(self) -> TextRecipe:
        """What all results are of."""
        return TextRecipe.from_json(self.header["recipe"])

    def losses(self, configuration: str) -> dict[tuple[float, int], float]:
        """By learning rate and rung, as far as they are there."""
        return {key[1:]: trial.loss for key, trial in self.trials.items() if key[0] == configuration}

    def rate_of(self, configuration: str) -> float | None:
        """The learning rate that was found for a configuration; None as long as it is not known, or if none works."""
        rates, rung = self.recipe.standing(self.losses(configuration))
        return rates[0] if rates and rung is None else None

    def costs_on(self, card: str) -> dict[str, CostResult]:
        """Of the configurations that were measured on it."""
        return {configuration: result for (device, configuration), result in self.measured.items() if device == card}

    @property
    def card(self) -> str:
        """The one on which most configurations were measured; empty if none was."""
        counts = Counter(device for device, _ in self.measured)
        return max(counts, key=counts.__getitem__, default="")

    @property
    def costs(self) -> dict[str, CostResult]:
        """By configuration, all on `card`."""
        return self.costs_on(self.card)

    def decoding_speeds(self, batch: int) -> dict[str, float]:
        """By configuration, as far as there are figures; as `CostResult.decoding_speed`."""
        found = {configuration: result.decoding_speed(batch) for configuration, result in self.costs.items()}
        return {configuration: speed for configuration, speed in found.items() if speed is not None}

    @property
    def configurations(self) -> dict[tuple[str, int], TextResult]:
        """The trainings with the learning rates that were found, by configuration and seed."""
        found = {configuration: self.rate_of(configuration) for configuration, _, _ in self.trainings}
        return {
            (configuration, seed): result
            for (configuration, seed, rate), result in self.trainings.items()
            if rate == found[configuration]
        }

    def of_configuration(self, configuration: str) -> list[TextResult]:
        """A configuration's results with the learning rate that was found, by seed."""
        rate = self.rate_of(configuration)
        keys = sorted(key for key in self.trainings if key[0] == configuration and key[2] == rate)
        return [self.trainings[key] for key in keys]


def now() -> str:
    """The time as result files have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def append_line(path: Path, header: dict[str, Any], content: dict[str, Any]) -> None:
    """Add a line to a result file, after its header where it is new; it is on disk when this returns.

    Several processes may add to one file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        file.seek(0)
        text = file.read()
        complete = text[: text.rfind("\n") + 1]
        lines = [content] if complete else [header, content]
        file.truncate(len(complete.encode()))
        file.write("".join(as_json(line, separators=(",", ":")) + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Lines of a result file after its header, with their numbers from 1."""
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]  # a killed process may have left a part of a line
    return list(enumerate(complete.splitlines(), start=1))[1:]


def read_header(path: Path, suite: str) -> dict[str, Any]:
    """The first line of a suite's result file: suite, recipe, corpus.

    Raises:
        ValueError: it is no such file.
    """
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    try:
        header = json.loads(first)
        if header["suite"] != suite:
            raise ValueError(f"it is of the suite {header['suite']!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result file of the suite {suite!r}: {error}") from error
    return header


def checked_header(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """The first line of a result file; ValueError unless it holds what is expected, such as recipe and corpus."""
    found = read_header(path, expected["suite"])
    for key, ours in expected.items():
        if found.get(key) != ours:
            raise ValueError(
                f"{path} holds results of another {key} ({_short(found.get(key))}, now {_short(ours)}),"
                " which do not mix: give another --out"
            )
    return found


def _short(x: object) -> str:
    text = json.dumps(x)
    return text if len(text) < 400 else text[:400] + "..."
