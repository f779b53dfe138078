"""Claims: what a paper says, the experiments that test it, and a gate that passes, fails or warns."""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from experiments.configurations import label_of
from experiments.experiment import Experiment
from experiments.lab_records import Record
from experiments.task import get_task

__all__ = ["Check", "Claim", "Missing", "Scores", "Verdict", "error_of_difference", "gap", "too_easy", "verdict_of"]

Verdict = Literal["pass", "warn", "fail", "printed", "not run"]
_FROM_BEST_TO_WORST: tuple[Verdict, ...] = ("printed", "pass", "warn", "fail")


class Missing(Exception):
    """A gate asked for a run that the results do not have."""


@dataclass(frozen=True)
class Check:
    """One comparison and its outcome."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is to be reproduced.

    Attributes:
        name: short, for tables and file names.
        statement: the claim, one sentence.
        paper: the paper's own figures and where they stand.
        differences: how our recipe departs from the paper's.
        experiments: the results that the gate reads.
        judge: the gate.
        picture: "lengths" (score against test length or condition), "curve" (training accuracy against step) or
            "table" (every configuration on every experiment).
        tried: what was tried where a gate is not met, why the verdict stands and what is open; empty otherwise.
    """

    name: str
    statement: str
    paper: str
    differences: str
    experiments: tuple[Experiment, ...]
    judge: Callable[["Scores"], list[Check]]
    picture: Literal["lengths", "curve", "table"] = "lengths"
    tried: str = ""

    def checks(self, scores: "Scores") -> list[Check]:
        """The outcome of every comparison; one "not run" if results are missing."""
        try:
            return self.judge(scores)
        except Missing as missing:
            return [Check("not run", str(missing))]


def verdict_of(checks: Iterable[Check]) -> Verdict:
    """The worst outcome."""
    found = [check.verdict for check in checks]
    if "not run" in found:
        return "not run"
    return max(found, key=_FROM_BEST_TO_WORST.index, default="not run")


class Scores:
    """Results by experiment, configuration and condition, for gates. Best and median are over seeds."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)

    def _of(self, experiment: str, configuration: str) -> list[Record]:
        return [r for r in self.records if (r.experiment, r.configuration) == (experiment, configuration)]

    def all(self, experiment: str, configuration: str, condition: int | str, rate: float | None = None) -> list[float]:
        """Accuracy (bits for tasks in bits) of every seed; only at one learning rate if given.

        Raises:
            Missing: no such result.
        """
        found = [
            record
            for record in self._of(experiment, configuration)
            if (rate is None or record.learning_rate == rate) and str(condition) in record.scores
        ]
        if not found:
            at = "" if rate is None else f" at learning rate {rate:g}"
            raise Missing(f"{label_of(configuration)} has no result in {experiment}{at}, condition {condition}")
        return [getattr(record.scores[str(condition)], get_task(record.task).metric) for record in found]

    def best(self, experiment: str, configuration: str, condition: int | str, rate: float | None = None) -> float:
        """The best seed's accuracy."""
        return max(self.all(experiment, configuration, condition, rate))

    def fewest_bits(self, experiment: str, configuration: str, condition: int | str) -> float:
        """The best seed's bits per answer."""
        return min(self.all(experiment, configuration, condition))

    def mean(self, experiment: str, configuration: str, condition: int | str, rate: float | None = None) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.all(experiment, configuration, condition, rate))

    def steps_to(self, experiment: str, configuration: str, accuracy: float) -> int | None:
        """First step at which the best seed's training accuracy reached a level, or None if none did."""
        found = self._of(experiment, configuration)
        if not found:
            raise Missing(f"{label_of(configuration)} has no result in {experiment}")
        reached = [next((step for step, _, now in record.curve if now >= accuracy), None) for record in found]
        return min((step for step in reached if step is not None), default=None)

    def training_bits(self, experiment: str, configuration: str) -> float:
        """The best seed's bits per answer on training batches, at all positions: mean of the curve's last fifth."""
        curves = [record.curve for record in self._of(experiment, configuration) if record.curve]
        if not curves:
            raise Missing(f"{label_of(configuration)} has no training curve in {experiment}")
        return min(statistics.fmean(nats for _, nats, _ in c[-max(1, len(c) // 5) :]) for c in curves) / math.log(2)

    def at_least(
        self, experiment: str, configuration: str, condition: int | str, bound: float, *, otherwise: Verdict = "fail"
    ) -> Check:
        """Best seed at or above a bound."""
        values = self.all(experiment, configuration, condition)
        verdict: Verdict = "pass" if max(values) >= bound else otherwise
        return Check(verdict, f"{self.describe(configuration, condition, values)}, wanted at least {bound:.2f}")

    def at_most(
        self, experiment: str, configuration: str, condition: int | str, bound: float, *, otherwise: Verdict = "fail"
    ) -> Check:
        """Best seed at or below a bound, for what a configuration must not be able to do."""
        values = self.all(experiment, configuration, condition)
        verdict: Verdict = "pass" if max(values) <= bound else otherwise
        return Check(verdict, f"{self.describe(configuration, condition, values)}, wanted at most {bound:.2f}")

    def show(
        self,
        experiment: str,
        configuration: str,
        condition: int | str,
        rate: float | None = None,
        *,
        named: bool = False,
    ) -> Check:
        """A figure without a gate; `named` puts the experiment before it, for claims that look at several."""
        at = "" if rate is None else f" (lr {rate:g})"
        where = f"{experiment}, " if named else ""
        return Check(
            "printed",
            where + self.describe(configuration, condition, self.all(experiment, configuration, condition, rate)) + at,
        )

    @staticmethod
    def describe(configuration: str, condition: int | str, values: list[float]) -> str:
        """`KDA at 128: 0.97` and, with several seeds, the median."""
        where = f"at {condition}" if isinstance(condition, int) else f"({condition})"
        seeds = f" (best of {len(values)} seeds, median {statistics.median(values):.3f})" if len(values) > 1 else ""
        return f"{label_of(configuration)} {where}: {max(values):.3f}{seeds}"


def gap(what: str, difference: float, bound: float, *, otherwise: Verdict = "fail") -> Check:
    """A difference at or above a bound."""
    verdict: Verdict = "pass" if difference >= bound else otherwise
    return Check(verdict, f"{what}: {difference:+.3f}, wanted at least {bound:+.2f}")


def error_of_difference(ours: list[float], theirs: list[float]) -> float:
    """Standard error of the difference of two means over seeds, of at least two values each."""
    return math.sqrt(sum(statistics.variance(values) / len(values) for values in (ours, theirs)))


def too_easy(what: str, value: float, bound: float) -> Check:
    """Fail if the configuration that should struggle does well: then the task shows nothing."""
    if value > bound:
        return Check(
            "fail", f"too easy: {what} reaches {value:.3f}, above {bound:.2f}, so the task tells nothing apart"
        )
    return Check("pass", f"hard enough: {what} stays at {value:.3f}, below {bound:.2f}")
