"""The suite: trainings that a result file lacks, the most important first, within a time limit.

Trainings may be of several kinds of GPU, speeds would not compare then. So costs are measured by jobs of their own,
after the trainings or where the limit leaves no time for one, and count on one kind alone.
"""

import gc
import multiprocessing
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deltazoo.names import unknown
from experiments.configurations import SOFTMAX
from experiments.lab_records import Environment
from experiments.runner import device_is_lost
from experiments.text.decoding import decoding, state_bytes
from experiments.text.race import train_best
from experiments.text.results import CostResult, Job, TextResult, TextResults, Trial, now
from experiments.text.scoring import file_bytes, score
from experiments.text.text_comparison import bits_per_byte
from experiments.text.text_configurations import (
    HYBRID,
    base_configurations,
    hybrid_of,
    intermediate_size,
)
from experiments.text.text_corpus import TextCorpus
from experiments.text.text_recipe import TextRecipe
from experiments.text.training import Training

__all__ = ["HYBRIDS", "SECOND_SEEDS", "devices_of", "missing_jobs", "open_results", "run_text_suite"]

HYBRIDS = 4
"""Rules that are also trained as hybrids: the best ones alone."""
SECOND_SEEDS = 5
"""Configurations that are trained with a second seed: the best ones."""
_SCORING_SECONDS = 60.0
"""Guess of the time from the end of a training to its line in the file, before there is one to go by."""
_DECODING_SECONDS = 40.0
"""Guess of the time that measuring the decoding of a configuration takes, after the steps that time its training."""


def open_results(path: Path, recipe: TextRecipe, corpus: TextCorpus | None) -> TextResults:
    """The result file of a recipe on a corpus, or, to see what it lacks, on any; see `TextResults`."""
    if corpus is None:
        return TextResults(path, recipe)
    return TextResults(path, recipe, corpus.digest, file_bytes(corpus, recipe).tolist())


def devices_of(device: str) -> list[str]:
    """The devices to work on: "cuda" is all GPUs, anything else itself."""
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] if device == "cuda" else [device]


def missing_jobs(results: TextResults, only: Sequence[str] = (), card: str = "") -> list[Job]:
    """What is still to be done, in order.

    First the training of every rule and softmax attention. When all of them are there: the hybrids of the best four
    rules, then the second seeds of the best five configurations. Last the costs of every configuration that is trained.
    One whose loss is not finite at any learning rate is left out.

    Args:
        results: what is done.
        only: configurations, hybrids among them; these alone, with one seed.
        card: on which costs are measured; that of the results' costs unless given.

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
    trained = [name for name, seed in results.configurations if seed == 0 and (not only or name in only)]
    measured = results.costs_on(card or results.card)
    return _missing_trainings(results, only) + [Job(name, costs=True) for name in trained if name not in measured]


def _missing_trainings(results: TextResults, only: Sequence[str]) -> list[Job]:
    missing = _missing_of(only or base_configurations(), results)
    if missing or only:
        return missing
    best = _best_first(results)
    rules = [name for name in best if name != SOFTMAX and not name.startswith(HYBRID)]
    missing = _missing_of([hybrid_of(rule) for rule in rules[:HYBRIDS]], results)
    if missing:
        return missing
    return [Job(name, seed=1) for name in best[:SECOND_SEEDS] if (name, 1) not in results.configurations]


def run_text_suite(
    results: TextResults,
    corpus: TextCorpus,
    *,
    devices: Sequence[str],
    environment: Environment,
    limit: float | None = None,
    only: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> list[Job]:
    """Train and measure what is missing, each result kept as soon as it is there.

    What the limit does not leave time for, the way to a rung, the rest of a training or a measurement, is not begun, or
    abandoned once its pace is known, and leaves nothing; shorter ones behind it are tried.

    Args:
        results: extended in place.
        corpus: what they are of.
        devices: "cpu", or GPUs of one kind. Several work side by side, each in a process of its own.
        environment: of these devices.
        limit: seconds.
        only: as of `missing_jobs`.
        report: called with a line of progress; processes of their own print theirs.

    Returns:
        What is missing still.

    Raises:
        RuntimeError: jobs failed; all others were tried.
    """
    deadline = None if limit is None else time.monotonic() + limit
    passed_over: set[Job] = set()
    failures: list[str] = []

    def due(running: Collection[Job] = ()) -> Job | None:
        jobs = (
            job
            for job in missing_jobs(results, only, environment.device)
            if job not in passed_over and job not in running
        )
        return next(jobs, None)

    def ended(job: Job, end: "_End") -> bool:
        """Note how it ended; whether its device is still there."""
        if end.trouble is not None:
            passed_over.add(job)
        if end.failed:
            failures.append(f"{job.name}: {end.trouble}")  # raised at the end, so that it does not end the others
        return not end.device_is_lost

    if len(devices) == 1:
        worker = _Worker(results, corpus, devices[0], environment, deadline, report)
        while (job := due()) is not None and ended(job, worker(job)):
            pass
    else:
        _work_side_by_side(results, corpus, devices, environment, deadline, due, ended)
    if failures:
        raise RuntimeError("; ".join(failures))
    return missing_jobs(results, only, environment.device)


def _work_side_by_side(
    results: TextResults,
    corpus: TextCorpus,
    devices: Sequence[str],
    environment: Environment,
    deadline: float | None,
    due: Callable[[Collection[Job]], Job | None],
    ended: Callable[[Job, "_End"], bool],
) -> None:
    """A process for each device, which take jobs one after another and write to the result file."""
    context = multiprocessing.get_context("spawn")
    free = context.SimpleQueue()
    for device in devices:
        free.put(device)
    given = (free, results.path, results.recipe, corpus, environment, deadline)
    running: dict[Future[_End], Job] = {}
    with ProcessPoolExecutor(len(devices), context, _start_process, given) as pool:
        while True:
            while len(running) < len(devices) and (job := due(running.values())) is not None:
                running[pool.submit(_work_in_process, job)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                results.reload()
                if not ended(job, future.result()):
                    raise RuntimeError(f"{job.name} has cost its process the GPU: the same command goes on")


@dataclass(frozen=True)
class _End:
    """How a job ended."""

    trouble: str | None = None
    """None: it is done."""
    failed: bool = False
    device_is_lost: bool = False


@dataclass(frozen=True)
class _Worker:
    """Does one job after another on one device."""

    results: TextResults
    corpus: TextCorpus
    device: str
    environment: Environment
    deadline: float | None
    report: Callable[[str], None]

    def __call__(self, job: Job) -> _End:
        try:
            if job.costs:
                self._measure(job)
            else:
                self._train(job)
            end = _End()
        except OutOfTime:
            self.report(f"{job.name}: no time left for it")
            end = _End("no time left")
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            self.report(f"{job.name}: FAILED, {trouble}")
            end = _End(trouble, failed=True, device_is_lost=device_is_lost(self.device))
        gc.collect()
        if torch.device(self.device).type == "cuda" and not end.device_is_lost:
            torch.cuda.empty_cache()
        return end

    def _train(self, job: Job) -> None:
        """Train and score a configuration, and keep what comes of it."""
        results, corpus = self.results, self.corpus
        recipe = results.recipe
        scoring = max(
            (training.seconds - training.training_seconds for training in results.trainings.values()),
            default=_SCORING_SECONDS,
        )

        def start(rate: float) -> Training:
            return self._start(job, rate)

        def advance(training: Training, steps: int) -> None:
            self._advance(job, training, steps, later=scoring if steps == recipe.steps else 0.0)

        def keep(rate: float, rung: int, loss: float, training: Training) -> None:
            trial = Trial(
                configuration=job.configuration,
                rate=rate,
                rung=rung,
                loss=loss,
                seconds=round(training.seconds, 2),
                tokens_per_second=round(training.tokens_per_second, 1),
                environment=self.environment,
                date=now(),
            )
            results.add(trial)
            speed = f"{trial.tokens_per_second:,.0f} tokens/s"
            self.report(f"{job.name}: learning rate {rate:g}, loss {loss:.4f} after {rung} steps, {speed}")

        training: Training | None
        if job.seed:
            rate = results.rate_of(job.configuration)
            assert rate is not None
            training = start(rate)
            advance(training, recipe.steps)
            if not training.is_finite:
                raise ArithmeticError(f"the loss is not finite after {training.steps} steps at learning rate {rate:g}")
        else:
            losses = results.losses(job.configuration)
            trained = [rate for name, seed, rate in results.trainings if (name, seed) == (job.configuration, 0)]
            training = train_best(recipe, losses, trained, start=start, advance=advance, keep=keep)
            if training is None:
                return
        began = time.monotonic()
        scores = {str(length): found.as_json() for length, found in score(training.model, corpus, recipe).items()}
        result = TextResult(
            configuration=job.configuration,
            seed=job.seed,
            rate=training.rate,
            parameters=sum(parameter.numel() for parameter in training.model.parameters()),
            intermediate_size=intermediate_size(job.configuration, recipe, corpus.vocab_size),
            curve=training.curve(),
            scores=scores,
            training_seconds=round(training.seconds, 2),
            tokens_per_second=round(training.tokens_per_second, 1),
            seconds=round(training.seconds + time.monotonic() - began, 2),
            environment=self.environment,
            date=now(),
        )
        results.add(result)
        speed = f"{result.tokens_per_second:,.0f} tokens/s"
        self.report(f"{job.name}: {bits_per_byte(result, results):.4f} bits per byte, {speed}, {result.seconds:.0f} s")

    def _measure(self, job: Job) -> None:
        """Measure the first steps of a configuration's training, and how the model that they leave decodes."""
        recipe, device = self.results.recipe, torch.device(self.device)
        rate = self.results.rate_of(job.configuration)
        assert rate is not None
        training = self._start(job, rate)
        self._advance(job, training, recipe.rungs[0], later=_DECODING_SECONDS)
        model, steps, speed, peak = training.model, training.steps, training.tokens_per_second, training.peak_bytes
        del training  # the optimizer's state
        model.eval()
        if device.type == "cuda":
            model.bfloat16()
        prompt = torch.from_numpy(self.corpus.held_out[: recipe.decode_context].astype("int64")).to(device)
        result = CostResult(
            configuration=job.configuration,
            training_steps=steps,
            tokens_per_second=round(speed, 1),
            peak_bytes=peak,
            state_bytes={str(tokens): state_bytes(model, tokens) for tokens in recipe.scored_lengths[:2]},
            decoding=decoding(model, recipe, prompt),
            environment=self.environment,
            date=now(),
        )
        self.results.add(result)
        speeds = "; ".join(f"{batch}: {result.decoding_figure(batch)}" for batch in recipe.decode_batches)
        self.report(f"{job.name}: {speed:,.0f} tokens/s in training; in decoding, by rows: {speeds}")

    def _start(self, job: Job, rate: float) -> Training:
        given = self.results.recipe, self.corpus
        return Training(job.configuration, *given, rate=rate, seed=job.seed, device=self.device)

    def _advance(self, job: Job, training: Training, steps: int, *, later: float) -> None:
        """Train to a step, if so many seconds are left after it."""
        speed = _known_speed(job.configuration, self.results)
        if speed is not None:
            self._check_time((steps - training.steps) * self.results.recipe.tokens_per_step / speed + later)
        training.advance(steps, watch=lambda seconds_left: self._check_time(seconds_left + later))

    def _check_time(self, seconds: float) -> None:
        if self.deadline is not None and time.monotonic() + seconds > self.deadline:
            raise OutOfTime


_process: dict[str, _Worker] = {}


def _start_process(
    free: Any,
    path: Path,
    recipe: TextRecipe,
    corpus: TextCorpus,
    environment: Environment,
    deadline: float | None,
) -> None:
    """Prepare a new process, which takes the next of the devices."""
    device = free.get()
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    report = partial(print, flush=True)
    _process["worker"] = _Worker(open_results(path, recipe, corpus), corpus, device, environment, deadline, report)


def _work_in_process(job: Job) -> _End:
    _process["worker"].results.reload()  # others have written to the file
    return _process["worker"](job)


class OutOfTime(Exception):
    """The time limit leaves too little for what is next."""


def _missing_of(configurations: Sequence[str], results: TextResults) -> list[Job]:
    done = results.configurations
    recipe = results.recipe
    works = {name: bool(recipe.standing(results.losses(name))[0]) for name in configurations}
    return [Job(name) for name in configurations if works[name] and (name, 0) not in done]


def _best_first(results: TextResults) -> list[str]:
    """Configurations by the bits per byte of their first seed."""
    first = {configuration: result for (configuration, seed), result in results.configurations.items() if seed == 0}
    return sorted(first, key=lambda configuration: bits_per_byte(first[configuration], results))


def _known_speed(configuration: str, results: TextResults) -> float | None:
    """Tokens per second of a configuration's last trial, else of the slowest one of all; None where there is none."""
    speeds = {trial.configuration: trial.tokens_per_second for trial in results.trials.values()}
    return speeds.get(configuration, min(speeds.values(), default=None))
