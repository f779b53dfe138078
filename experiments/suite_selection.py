"""Selection of a suite's experiments by name, with an error that lists the known names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from deltazoo.layers import make_layer
from deltazoo.names import unknown
from experiments.claims import Claim
from experiments.configurations import parse_configuration
from experiments.experiment import Experiment, list_experiments
from experiments.suites import get_suite

__all__ = ["Selection", "select"]


@dataclass(frozen=True)
class Selection:
    """Experiments to run, and the claims that they can judge."""

    experiments: tuple[Experiment, ...]
    claims: tuple[Claim, ...]


def select(
    suite: str,
    *,
    only: Sequence[str] = (),
    configurations: Sequence[str] = (),
    further_configurations: Sequence[str] = (),
    steps: int | None = None,
) -> Selection:
    """Choose experiments of a suite.

    Args:
        suite: "mini", "full" or "family".
        only: names of experiments, tasks or claims; all of the suite if empty.
        configurations: run these instead of each experiment's own.
        further_configurations: run these besides.
        steps: train so many steps instead of the recipe's.

    Raises:
        ValueError: an unknown suite, name or configuration.
    """
    claims = get_suite(suite)
    known = {experiment.name: experiment for claim in claims for experiment in claim.experiments}
    known |= {experiment.name: experiment for experiment in list_experiments(suite)}
    chosen = dict(known) if not only else {}
    for name in only:
        of_claim = {e.name for claim in claims if claim.name == name for e in claim.experiments}
        found = [e for e in known.values() if name in (e.name, e.task.name) or e.name in of_claim]
        if not found:
            names = [*known, *(e.task.name for e in known.values()), *(claim.name for claim in claims)]
            raise ValueError(unknown(f"task in the suite {suite!r}:", name, list(dict.fromkeys(names))))
        chosen |= {experiment.name: experiment for experiment in found}
    for configuration in map(parse_configuration, configurations):
        if configuration.spec is not None:  # a rule that refuses an option says so before any run
            with torch.device("meta"):
                make_layer(configuration.spec, 16, 1, 16, expand_v=1.0, **configuration.options)
    experiments = []
    for experiment in chosen.values():
        wanted = tuple(configurations) or experiment.configurations
        extra = tuple(configuration for configuration in further_configurations if configuration not in wanted)
        changed = experiment.with_configurations((*wanted, *extra))
        experiments.append(changed if steps is None else changed.with_steps(steps))
    by_name = {experiment.name: experiment for experiment in experiments}
    judged = tuple(
        replace(claim, experiments=tuple(by_name[e.name] for e in claim.experiments))
        for claim in claims
        if all(e.name in by_name for e in claim.experiments)
    )
    return Selection(tuple(experiments), judged)
