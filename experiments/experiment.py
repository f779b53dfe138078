"""An experiment: one task, one recipe, several configurations; and the runs it consists of."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from experiments.configurations import parse_configuration
from experiments.recipe import Recipe
from experiments.task import Task

__all__ = ["Experiment", "Run", "list_experiments", "register_experiment"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One configuration, one learning rate, one seed."""

    experiment: str
    task: Task
    configuration: str
    recipe: Recipe
    seed: int

    @property
    def key(self) -> str:
        """The name of the run, unique in a suite."""
        return f"{self.experiment} {self.configuration} lr={self.recipe.learning_rate:g} seed={self.seed}"

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides the run's numbers; runs with equal fingerprints give equal numbers."""
        configuration = parse_configuration(self.configuration)
        decided = {
            "task": [type(self.task).__name__, asdict(self.task)],
            "recipe": asdict(self.recipe),
            "spec": None if configuration.spec is None else asdict(configuration.spec),
            "options": configuration.options,
            "seed": self.seed,
        }
        text = json.dumps(decided, sort_keys=True, default=_name_of_function)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def cost(self) -> float:
        """Rough relative duration: every step costs a fixed number of launches and its memory traffic."""
        recipe = self.recipe
        moved = recipe.batch_size * sum(recipe.train_lengths) / 2 * recipe.hidden_size
        return recipe.steps * recipe.num_layers * (1 + moved / 3e6)


def _name_of_function(value: Any) -> str:
    """Of a step size or gate that a spec holds; `lab_records.code_digest` covers what the function computes."""
    if not hasattr(value, "__qualname__"):
        raise TypeError(f"a run is decided by plain values and named functions, got {value!r}")
    return f"{value.__module__}.{value.__qualname__}"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is compared.

    Attributes:
        name: in result files and for `--only`.
        task, recipe: the same for all configurations.
        configurations: by name, see `experiments.configurations`.
        rates: learning rates of configurations that do not use the recipe's.
        seeds: run at first; spare_seeds: run too when a claim on the experiment fails.
        suites: where an experiment that belongs to no claim runs: "mini", "full", "family".
        headline: the test condition that a table over several experiments shows; the first of the recipe unless given.
    """

    name: str
    task: Task
    recipe: Recipe
    configurations: tuple[str, ...]
    rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    spare_seeds: tuple[int, ...] = ()
    suites: tuple[str, ...] = ()
    headline: int | str | None = None

    def __post_init__(self) -> None:
        self.task.check_length(self.recipe.train_lengths[0])
        if self.shown not in self.recipe.test:
            raise ValueError(
                f"experiment {self.name!r} has the headline {self.headline!r}, which it does not test: "
                f"{', '.join(map(str, self.recipe.test))}"
            )
        for configuration in self.configurations:
            parse_configuration(configuration)
        if others := self.rates.keys() - set(self.configurations):
            raise ValueError(f"experiment {self.name!r} has learning rates for {sorted(others)}, which it does not run")

    @property
    def shown(self) -> int | str:
        """The test condition of tables over several experiments."""
        return self.recipe.test[0] if self.headline is None else self.headline

    def runs(self, *, spare: bool = False) -> list[Run]:
        """Every run, those of the spare seeds too if asked."""
        return [
            Run(
                experiment=self.name,
                task=self.task,
                configuration=configuration,
                recipe=replace(self.recipe, learning_rate=rate),
                seed=seed,
            )
            for configuration in self.configurations
            for rate in self.rates.get(configuration, (self.recipe.learning_rate,))
            for seed in (*self.seeds, *(self.spare_seeds if spare else ()))
        ]

    def with_configurations(self, configurations: tuple[str, ...]) -> "Experiment":
        """The same comparison between other configurations."""
        return replace(
            self,
            configurations=configurations,
            rates={
                configuration: rates for configuration, rates in self.rates.items() if configuration in configurations
            },
        )

    def with_steps(self, steps: int) -> "Experiment":
        """The same comparison, shorter or longer."""
        return replace(self, recipe=replace(self.recipe, steps=steps))


_EXPERIMENTS: dict[str, Experiment] = {}


def register_experiment(experiment: Experiment) -> Experiment:
    """Make an experiment part of the suites it names, beside those of the claims.

    Raises:
        ValueError: it names no suite, or its name is taken.
    """
    if not experiment.suites or set(experiment.suites) - {"mini", "full", "family"}:
        raise ValueError(
            f"experiment {experiment.name!r} must say in which suites it runs ('mini', 'full', 'family'), "
            f"got {experiment.suites}"
        )
    known = _EXPERIMENTS.setdefault(experiment.name, experiment)
    if known != experiment:
        raise ValueError(f"the experiment name {experiment.name!r} is taken by another experiment")
    return experiment


def list_experiments(suite: str) -> list[Experiment]:
    """The registered experiments of a suite."""
    return [experiment for experiment in _EXPERIMENTS.values() if suite in experiment.suites]
