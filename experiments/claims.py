"""Claims: what a paper says, the experiments that test it, and gates that pass, fail or warn."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments.experiment import Experiment
from experiments.runner import Job, Line
from experiments.tasks import TASKS

_FROM_BEST_TO_WORST = ("printed", "pass", "warn", "fail", "not run")
Condition = int | str


class Missing(Exception):
    """A gate asked for a run that the results do not have."""


class Check(NamedTuple):
    """One comparison and its outcome: "pass", "warn", "fail", or "printed", a figure without a gate."""

    verdict: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is to be reproduced."""

    name: str
    statement: str
    paper: str
    """The paper's own figures and where they stand."""
    differences: str
    """How our recipe departs from the paper's."""
    experiments: tuple[Experiment, ...]
    gates: tuple["Gate", ...]

    def checks(self, scores: "Scores") -> list[Check]:
        """The outcome of every comparison; one "not run" if results are missing."""
        try:
            return [check for gate in self.gates for check in gate(scores)]
        except Missing as missing:
            return [Check("not run", str(missing))]

    def verdict(self, scores: "Scores") -> str:
        """The worst outcome."""
        return max((check.verdict for check in self.checks(scores)), key=_FROM_BEST_TO_WORST.index)


class Scores:
    """Results by experiment, configuration, condition and, if given, learning rate; each with all its seeds."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines: dict[tuple[str, str], list[Line]] = {}
        for line in lines:
            configuration = line.get("configuration") or line["arm"]  # the key in files of before
            self._lines.setdefault((line["experiment"], configuration), []).append(line)

    def lines(self, experiment: str, configuration: str) -> list[Line]:
        """The runs of one configuration."""
        if (experiment, configuration) not in self._lines:
            raise Missing(f"{configuration} has no result in {experiment}")
        return self._lines[experiment, configuration]

    def all(self, experiment: str, configuration: str, condition: Condition, rate: float | None = None) -> list[float]:
        """Accuracy (bits for tasks in bits) of every seed."""
        found = [
            line["scores"][str(condition)][TASKS[line["task"]].metric]
            for line in self.lines(experiment, configuration)
            if (rate is None or line["learning_rate"] == rate) and str(condition) in line["scores"]
        ]
        if not found:
            raise Missing(
                f"{configuration} has no result in {experiment} at {condition}, learning rate {rate or 'any'}"
            )
        return found

    def best(self, experiment: str, configuration: str, condition: Condition) -> float:
        """The best seed."""
        of_seeds = self.all(experiment, configuration, condition)
        return min(of_seeds) if self.in_bits(experiment, configuration) else max(of_seeds)

    def mean(self, experiment: str, configuration: str, condition: Condition, rate: float | None = None) -> float:
        """The mean of the seeds."""
        return statistics.fmean(self.all(experiment, configuration, condition, rate))

    def in_bits(self, experiment: str, configuration: str) -> bool:
        """Whether lower is better."""
        return TASKS[self.lines(experiment, configuration)[0]["task"]].metric == "bits"

    def steps_to(self, experiment: str, configuration: str, accuracy: float) -> float:
        """First step at which the best seed's training accuracy reached a level; infinity if none did."""
        curves = [line["curve"] for line in self.lines(experiment, configuration)]
        return min((step for curve in curves for step, _, now in curve if now >= accuracy), default=math.inf)


Gate = Callable[[Scores], list[Check]]
"""What judges results."""


def _each(one: Any) -> Sequence[Any]:
    return one if isinstance(one, tuple) else (one,)


def at_least(
    experiment: str, configurations: Any, conditions: Any, bound: float, otherwise: str = "fail", *, sign: int = 1
) -> Gate:
    """The best seed at or above a bound, for each of some configurations at each of some conditions."""

    def gate(scores: Scores) -> list[Check]:
        checks = []
        for configuration in _each(configurations):
            for condition in _each(conditions):
                of_seeds = scores.all(experiment, configuration, condition)
                verdict = "pass" if sign * max(of_seeds) >= sign * bound else otherwise
                what = f"{experiment}, {configuration} at {condition}: {max(of_seeds):.3f}"
                checks.append(Check(verdict, f"{what}, wanted at {'least' if sign > 0 else 'most'} {bound:.2f}"))
        return checks

    return gate


def at_most(experiment: str, configurations: Any, conditions: Any, bound: float) -> Gate:
    """The best seed at or below a bound: what a configuration must not be able to do, or the task is too easy."""
    return at_least(experiment, configurations, conditions, bound, sign=-1)


def show(experiment: str, configurations: Any, conditions: Any) -> Gate:
    """Figures without a gate."""
    return lambda scores: [
        Check("printed", f"{experiment}, {name} at {condition}: {scores.best(experiment, name, condition):.3f}")
        for name in _each(configurations)
        for condition in _each(conditions)
    ]


def lead(
    experiment: str,
    better: Any,
    worse: str,
    condition: Condition,
    bound: float,
    otherwise: str = "fail",
    *,
    of: Callable[..., float] = Scores.best,
) -> Gate:
    """One configuration, or each of several, ahead of another by at least a bound, in accuracy or in bits."""

    def gate(scores: Scores) -> list[Check]:
        checks = []
        for name in _each(better):
            ahead = of(scores, experiment, name, condition) - of(scores, experiment, worse, condition)
            ahead = -ahead if scores.in_bits(experiment, name) else ahead
            what = f"{experiment} at {condition}: {name} ahead of {worse} by {ahead:+.3f}"
            checks.append(Check("pass" if ahead >= bound else otherwise, f"{what}, wanted at least {bound:+.2f}"))
        return checks

    return gate


@dataclass(frozen=True)
class Lab:
    """A suite of claims on small models."""

    claims: tuple[Claim, ...]

    @property
    def experiments(self) -> list[Experiment]:
        """All that the claims read, each once."""
        return list({experiment.name: experiment for claim in self.claims for experiment in claim.experiments}.values())

    def jobs(self, lines: list[Line]) -> list[Job]:
        """All jobs; once they are done, those of the spare seeds of claims that fail, too."""
        jobs = [job for experiment in self.experiments for job in experiment.jobs()]
        if {job["id"] for job in jobs} <= {line.get("id") for line in lines}:
            scores = Scores(lines)
            failed = {e.name for claim in self.claims if claim.verdict(scores) == "fail" for e in claim.experiments}
            jobs += [job for e in self.experiments if e.name in failed for job in e.jobs(spare=True)]
        return list({job["id"]: job for job in jobs}.values())

    def verdicts(self, lines: list[Line]) -> list[str]:
        """A line per claim and, below it, per check."""
        scores, found = Scores(lines), []
        for claim in self.claims:
            found.append(f"{claim.verdict(scores):8}{claim.name}: {claim.statement}")
            found += [f"{'':8}{verdict}: {text}" for verdict, text in claim.checks(scores)]
        return found
