"""The suite: trainings that a result file lacks, the most important first, within a time limit."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from deltazoo.names import unknown
from deltazoo.workbench.lab.configurations import SOFTMAX
from deltazoo.workbench.lab.lab_records import Environment
from deltazoo.workbench.lab.runner import device_is_lost
from deltazoo.workbench.lab.text.decoding import decoding, state_bytes
from deltazoo.workbench.lab.text.results import Job, TextResult, TextResults, Trial
from deltazoo.workbench.lab.text.scoring import file_bytes, score
from deltazoo.workbench.lab.text.text_comparison import bits_per_byte
from deltazoo.workbench.lab.text.text_configurations import HYBRID, base_configurations, hybrid_of, intermediate_size
from deltazoo.workbench.lab.text.text_corpus import TextCorpus
from deltazoo.workbench.lab.text.text_recipe import TextRecipe
from deltazoo.workbench.lab.text.training import train

__all__ = ["HYBRIDS", "SECOND_SEEDS", "missing_jobs", "open_results", "run_text_suite"]

HYBRIDS = 4
"""Rules that are also trained as hybrids: the best ones alone."""
SECOND_SEEDS = 5
"""Configurations that are trained with a second seed: the best ones."""
_SCORING_SECONDS = 60.0
"""Guess of the time from the end of a training to its line in the file, before there is one to go by."""


def open_results(path: Path, recipe: TextRecipe, corpus: TextCorpus) -> TextResults:
    """The result file of a recipe on a corpus; see `TextResults`."""
    return TextResults(path, recipe, corpus.digest, file_bytes(corpus, recipe).tolist())


def missing_jobs(results: TextResults, recipe: TextRecipe, only: Sequence[str] = ()) -> list[Job]:
    """What is still to be trained, in order.

    First every rule and softmax attention, each with its trials. When all of them are there: the hybrids of the best
    four rules, then the second seeds of the best five configurations. One whose loss is not finite at any rate is left
    out.

    Args:
        results: what is done.
        recipe: its rates are tried.
        only: configurations, hybrids among them; these alone, with one seed.

    Raises:
        ValueError: an unknown configuration.
    """
    known = [
        *base_configurations(),
        *(hybrid_of(configuration) for configuration in base_configurations() if configuration != SOFTMAX),
    ]
    for configuration in only:
        if configuration not in known:
            raise ValueError(unknown("configuration", configuration, known))
    missing = _missing_of(only or base_configurations(), results, recipe)
    if missing or only:
        return missing
    rules = [
        configuration
        for configuration in _best_first(results)
        if configuration != SOFTMAX and not configuration.startswith(HYBRID)
    ]
    missing = _missing_of([hybrid_of(rule) for rule in rules[:HYBRIDS]], results, recipe)
    if missing:
        return missing
    seconds = [Job(configuration, "configuration", seed=1) for configuration in _best_first(results)[:SECOND_SEEDS]]
    return [job for job in seconds if not results.has(job)]


def run_text_suite(
    results: TextResults,
    recipe: TextRecipe,
    corpus: TextCorpus,
    *,
    device: str,
    environment: Environment,
    limit: float | None = None,
    only: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> list[Job]:
    """Train what is missing, each result kept as soon as it is there.

    A training that the limit does not leave time for is not begun, or abandoned once its pace is known, and leaves
    nothing; shorter ones behind it are tried.

    Args:
        results: extended in place.
        recipe, corpus: what they are of.
        device: "cpu" or one GPU.
        environment: of this process.
        limit: seconds.
        only: as of `missing_jobs`.
        report: called with a line of progress.

    Returns:
        What is missing still.

    Raises:
        ValueError: the file has results of another device.
        RuntimeError: trainings failed; all others were tried.
    """
    devices = {trial.environment.device for trial in results.trials.values()}
    if others := devices - {environment.device}:
        raise ValueError(
            f"{results.path} holds results of {others.pop()}, this is {environment.device}: speeds would not compare"
        )
    deadline = None if limit is None else time.monotonic() + limit
    passed_over: set[Job] = set()
    failures: list[str] = []
    while True:
        job = next((job for job in missing_jobs(results, recipe, only) if job not in passed_over), None)
        if job is None:
            break
        if job.kind == "configuration" and any(
            (job.configuration, rate) not in results.trials for rate in recipe.rates
        ):
            passed_over.add(job)  # a trial failed, or there was no time for it
            continue
        try:
            _check_time(deadline, _expected_seconds(job, results, recipe))
            began = time.monotonic()
            result = _run(job, results, recipe, corpus, device, environment, deadline)
        except OutOfTime:
            passed_over.add(job)
            report(f"{job.name}: no time left for it")
        except Exception as error:  # raised at the end, so that it does not end the other trainings
            passed_over.add(job)
            failures.append(f"{job.name}: {type(error).__name__}: {error}")
            report(f"{job.name}: FAILED, {type(error).__name__}: {error}")
            if device_is_lost(device):
                break
        else:
            results.add(result)
            report(f"{job.name}: {_figures(result, results)}, {time.monotonic() - began:.0f} s")
        gc.collect()
        if torch.device(device).type == "cuda" and not device_is_lost(device):
            torch.cuda.empty_cache()
    if failures:
        raise RuntimeError("; ".join(failures))
    return missing_jobs(results, recipe, only)


class OutOfTime(Exception):
    """The time limit leaves too little for a training."""


def _missing_of(configurations: Sequence[str], results: TextResults, recipe: TextRecipe) -> list[Job]:
    missing = []
    for configuration in configurations:
        trials = [Job(configuration, "trial", rate=rate) for rate in recipe.rates]
        untried = [job for job in trials if not results.has(job)]
        missing += untried
        if untried or results.best_rate(configuration, recipe.rates) is not None:
            missing += [job for job in (Job(configuration, "configuration"),) if not results.has(job)]
    return missing


def _best_first(results: TextResults) -> list[str]:
    """Configurations by the bits per byte of their first seed."""
    first = {configuration: result for (configuration, seed), result in results.configurations.items() if seed == 0}
    return sorted(first, key=lambda configuration: bits_per_byte(first[configuration], results))


def _run(
    job: Job,
    results: TextResults,
    recipe: TextRecipe,
    corpus: TextCorpus,
    device: str,
    environment: Environment,
    deadline: float | None,
) -> Trial | TextResult:
    began = time.monotonic()
    is_trial = job.kind == "trial"
    rate = job.rate if is_trial else results.best_rate(job.configuration, recipe.rates)
    assert rate is not None
    later = 0.0 if is_trial else _scoring_seconds(results)
    trained = train(
        job.configuration,
        recipe,
        corpus,
        rate=rate,
        steps=recipe.trial_steps if is_trial else recipe.steps,
        seed=job.seed,
        device=device,
        watch=lambda seconds_left: _check_time(deadline, seconds_left + later),
    )
    if is_trial:
        return Trial(
            configuration=job.configuration,
            rate=rate,
            loss=round(trained.judged(recipe.trial_judged), 5),
            seconds=round(time.monotonic() - began, 2),
            tokens_per_second=round(trained.tokens_per_second, 1),
            environment=environment,
            date=_now(),
        )
    if not trained.is_finite:
        if job.seed:
            raise ArithmeticError(f"the loss is not finite after {len(trained.losses)} steps at learning rate {rate:g}")
        return replace(results.trials[job.configuration, rate], loss=math.inf)  # the next best rate is taken instead
    scores = {str(length): found.as_json() for length, found in score(trained.model, corpus, recipe).items()}
    model = trained.model
    if torch.device(device).type == "cuda":
        model.bfloat16()
    prompt = torch.from_numpy(corpus.held_out[: recipe.decode_context].astype("int64")).to(device)
    return TextResult(
        configuration=job.configuration,
        seed=job.seed,
        rate=rate,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        intermediate_size=intermediate_size(job.configuration, recipe, corpus.vocab_size),
        curve=trained.curve(),
        scores=scores,
        training_seconds=round(trained.seconds, 2),
        tokens_per_second=round(trained.tokens_per_second, 1),
        peak_bytes=trained.peak_bytes,
        state_bytes={str(tokens): state_bytes(model, tokens) for tokens in recipe.scored_lengths[:2]},
        decoding=decoding(model, recipe, prompt),
        seconds=round(time.monotonic() - began, 2),
        environment=environment,
        date=_now(),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _check_time(deadline: float | None, seconds: float) -> None:
    if deadline is not None and time.monotonic() + seconds > deadline:
        raise OutOfTime


def _expected_seconds(job: Job, results: TextResults, recipe: TextRecipe) -> float:
    """Of a training, by the speed of the configuration's trials, else by the slowest one; 0 where nothing is known."""
    speeds = {configuration: trial.tokens_per_second for (configuration, _), trial in results.trials.items()}
    if not speeds:
        return 0.0
    steps = recipe.trial_steps if job.kind == "trial" else recipe.steps
    later = 0.0 if job.kind == "trial" else _scoring_seconds(results)
    return steps * recipe.tokens_per_step / speeds.get(job.configuration, min(speeds.values())) + later


def _scoring_seconds(results: TextResults) -> float:
    """From the end of a configuration's training to its line in the file."""
    return max(
        (configuration.seconds - configuration.training_seconds for configuration in results.configurations.values()),
        default=_SCORING_SECONDS,
    )


def _figures(result: Trial | TextResult, results: TextResults) -> str:
    speed = f"{result.tokens_per_second:,.0f} tokens/s"
    if isinstance(result, Trial):
        return f"learning rate {result.rate:g}, loss {result.loss:.4f}, {speed}"
    return f"{bits_per_byte(result, results):.4f} bits per byte, {speed}"
