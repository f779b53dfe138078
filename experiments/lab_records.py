"""Result files: one JSON line per run, appended as soon as it is done, so that a killed suite can continue."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.provenance import git_commit, gpu_name, package_version, processor_name
from deltazoo import __version__
from experiments.experiment import Experiment, Run
from experiments.fitting import Outcome, Score

__all__ = ["Environment", "Record", "ResultFile", "by_configuration", "by_name", "median_score", "read_records"]

_DECISIVE_IN_LAB = (
    "tasks",
    "configurations.py",
    "network.py",
    "recipe.py",
    "task.py",
    "fitting.py",
    "training_update.py",
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Machine and versions of a run."""

    device: str
    torch: str
    triton: str | None
    version: str
    commit: str
    code: str
    """Hash of the source files that can change a result, those that a user loads among them."""
    transformers: str | None = None
    """Softmax attention runs in it; None in results from before this was kept."""

    @classmethod
    def here(cls, device: str, commit: str | None = None, load: Sequence[Path] = ()) -> "Environment":
        """Of this process. `commit` is read from git unless given; `load` are the files that a user loads."""
        return cls(
            device=gpu_name(device) or f"CPU, {processor_name()}",
            torch=torch.__version__,
            triton=package_version("triton"),
            version=__version__,
            commit=commit or git_commit(),
            code=code_digest(tuple(load)),
            transformers=package_version("transformers"),
        )


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a result file."""

    suite: str
    experiment: str
    task: str
    configuration: str
    seed: int
    learning_rate: float
    steps: int
    parameters: int
    scores: dict[str, Score]
    curve: list[tuple[int, float, float]]
    seconds: float
    cpu_seconds: float
    fingerprint: str
    environment: Environment
    precision: str = "float32"
    device: str = "cpu"
    """Which of the machine's devices."""
    started: float | None = None
    """Seconds since the epoch; None in results from before this was kept."""

    @classmethod
    def of(cls, suite: str, run: Run, outcome: Outcome, environment: Environment) -> "Record":
        """What a run reached."""
        return cls(
            suite=suite,
            experiment=run.experiment,
            task=run.task.name,
            configuration=run.configuration,
            seed=run.seed,
            learning_rate=run.recipe.learning_rate,
            steps=run.recipe.steps,
            fingerprint=run.fingerprint,
            precision=run.recipe.precision,
            environment=environment,
            **{field.name: getattr(outcome, field.name) for field in fields(Outcome)},
        )

    @property
    def key(self) -> str:
        """As `Run.key`."""
        return f"{self.experiment} {self.configuration} lr={self.learning_rate:g} seed={self.seed}"

    def to_json(self) -> str:
        """One line. The configuration stands under the key `arm`, as in every file written so far."""
        content = {"arm" if key == "configuration" else key: value for key, value in asdict(self).items()}
        return json.dumps(content, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Record":
        """Back from a line."""
        content: dict[str, Any] = json.loads(line)
        content["configuration"] = content.pop("arm")
        content["scores"] = {condition: Score(**score) for condition, score in content["scores"].items()}
        content["curve"] = [tuple(point) for point in content["curve"]]
        content["environment"] = Environment(**content["environment"])
        return cls(**content)


def by_configuration(records: Iterable[Record]) -> dict[tuple[str, float], list[Record]]:
    """Records by configuration and learning rate."""
    groups: dict[tuple[str, float], list[Record]] = {}
    for record in records:
        groups.setdefault((record.configuration, record.learning_rate), []).append(record)
    return groups


def by_name(experiments: Sequence[Experiment], records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of some experiments by configuration alone, in the order in which the experiments name them."""
    groups: dict[str, list[Record]] = {name: [] for e in experiments for name in e.configurations}
    names = {experiment.name for experiment in experiments}
    for record in records:
        if record.experiment in names:
            groups.setdefault(record.configuration, []).append(record)
    return {name: members for name, members in groups.items() if members}


def median_score(records: Iterable[Record], experiment: Experiment, condition: int | str) -> float | None:
    """Accuracy, or bits for tasks in bits: the median of an experiment's records; None if there are none."""
    found = [
        r.scores[str(condition)] for r in records if r.experiment == experiment.name and str(condition) in r.scores
    ]
    return median(getattr(score, experiment.task.metric) for score in found) if found else None


def read_records(path: Path) -> list[Record]:
    """All complete lines of a result file; a last line cut short by a killed run is left out.

    Raises:
        ValueError: a line that is not a result, with its number.
    """
    records = []
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            records.append(Record.from_json(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is not a result of this version of the lab: {error}") from error
    return records


class ResultFile:
    """The results of one suite, to which runs are added.

    Args:
        path: of the JSON lines; need not exist.
        suite: its name.
        environment: of the runs to come.

    Raises:
        ValueError: the file holds results of other code, another device or other versions.
    """

    def __init__(self, path: Path, suite: str, environment: Environment) -> None:
        self.path, self.suite, self.environment = path, suite, environment
        self.records: dict[str, Record] = {}
        if path.exists():
            for record in read_records(path):
                self._check(record)
                self.records[record.key] = record
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # a killed run may have left a part of a line

    def _check(self, record: Record) -> None:
        advice = "give another --out, or --fresh to start over"
        if record.suite != self.suite:
            raise ValueError(f"{self.path} holds results of the suite {record.suite!r}, not {self.suite!r}: {advice}")
        for name in ("version", "code", "torch", "triton", "transformers", "device"):
            theirs, ours = getattr(record.environment, name), getattr(self.environment, name)
            if theirs != ours:
                what = "source files" if name == "code" else name
                raise ValueError(
                    f"{self.path} holds results of other {what} ({theirs}, now {ours}; commit "
                    f"{record.environment.commit}), which do not mix: {advice}"
                )

    def has(self, run: Run) -> bool:
        """Whether the run is done.

        Raises:
            ValueError: it was done with another recipe.
        """
        record = self.records.get(run.key)
        if record is not None and record.fingerprint != run.fingerprint:
            raise ValueError(
                f"{self.path} holds a result of {run.key} under another recipe (or other options): "
                "give another --out, or --fresh to start over"
            )
        return record is not None

    def add(self, run: Run, outcome: Outcome) -> Record:
        """Keep a result; it is on disk when this returns."""
        record = Record.of(self.suite, run, outcome, self.environment)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records[run.key] = record
        return record


@cache
def code_digest(load: tuple[Path, ...] = ()) -> str:
    """Hash of the files that can change a result: of the package, and those that a user loads."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.blake2b(digest_size=8)
    for path in decisive_files():
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for path in sorted(path.resolve() for path in load):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def decisive_files() -> list[Path]:
    """The Python files that can change a result: the library's, and those of the lab that build, train and test."""
    package = Path(__file__).resolve().parents[2]
    library = [path for path in package.rglob("*.py") if "workbench" not in path.relative_to(package).parts]
    lab = [package / "workbench" / "lab" / name for name in _DECISIVE_IN_LAB]
    return sorted([*library, *(path for root in lab for path in ([root] if root.is_file() else root.rglob("*.py")))])
