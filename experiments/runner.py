"""Runs of a suite in worker processes: those that a result file lacks, with progress, until done or out of time."""

import multiprocessing
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deltazoo.cli.rule_files import load_rule_file
from experiments.claims import Claim, Scores, verdict_of
from experiments.configurations import label_of, parse_configuration
from experiments.experiment import Experiment, Run
from experiments.fitting import Outcome, run_configuration
from experiments.lab_records import Record, ResultFile

__all__ = ["Plan", "device_is_lost", "run_suite"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to run.

    Attributes:
        device: "cpu"; "cuda", which spreads the workers over all GPUs; or one of them, "cuda:1".
        workers: processes; 0 runs everything in this one.
        time_limit: seconds after which runs are abandoned (finished ones are kept), or None. With a limit, experiments
            run one after another, the cheapest first, so that as many as possible are complete at the end. Without a
            limit the longest runs come first, so that no single long run is left at the end.
        load: Python files that register tasks and rules, loaded in every worker.
        retry: run the spare seeds of claims that fail.
    """

    device: str = "cpu"
    workers: int = 2
    time_limit: float | None = None
    load: tuple[Path, ...] = ()
    retry: bool = True

    def devices(self) -> list[str]:
        """Where each worker runs."""
        count = torch.cuda.device_count() if self.device == "cuda" else 0
        return [f"cuda:{i % count}" if count else self.device for i in range(max(1, self.workers))]


def run_suite(
    experiments: Sequence[Experiment],
    claims: Iterable[Claim],
    results: ResultFile,
    plan: Plan,
    report: Callable[[str], None] = print,
) -> int:
    """Run every run that has no result yet, then the spare seeds of claims that fail.

    Returns:
        How many runs are missing still (more than 0 only after the time limit).

    Raises:
        RuntimeError: some configurations failed; everything else was run.
    """
    deadline = None if plan.time_limit is None else time.time() + plan.time_limit
    failures: list[str] = []
    missing = _run([run for e in experiments for run in e.runs()], results, plan, deadline, report, failures)
    if plan.retry and not missing:
        failed = {
            experiment.name
            for claim in claims
            if verdict_of(claim.checks(Scores(results.records.values()))) == "fail"
            for experiment in claim.experiments
        }
        again = [run for e in experiments if e.name in failed for run in e.runs(spare=True)]
        missing = _run(again, results, plan, deadline, report, failures)
    if failures:
        raise RuntimeError("; ".join(failures))
    return missing


class OutOfTime(Exception):
    """The time limit was reached before the end of a run."""


class Untried(Exception):
    """The worker cannot run anything: an earlier run's kernel has cost it its GPU."""


def _run(
    runs: list[Run],
    results: ResultFile,
    plan: Plan,
    deadline: float | None,
    report: Callable[[str], None],
    failures: list[str],
) -> int:
    due = _in_order([run for run in runs if not results.has(run)], by_experiment=deadline is not None)
    if not due:
        return 0
    missing, untried = 0, list[Run]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bars, _Workers(plan, deadline) as workers:
        total = bars.add_task("steps", total=sum(run.recipe.steps for run in due))
        waiting = {workers.submit(run): run for run in due}
        while waiting:
            done, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            bars.advance(total, workers.finished_steps())
            for future in done:
                run = waiting.pop(future)
                try:
                    record = results.add(run, future.result())
                except (Untried, CancelledError):
                    untried.append(run)
                    for other in waiting:
                        other.cancel()
                except OutOfTime:
                    missing += 1
                except BrokenExecutor:
                    raise
                except Exception as error:  # raised at the end, so that it does not end the other runs
                    failures.append(f"{run.key}: {type(error).__name__}: {error}")
                    report(f"{run.key}: FAILED, {type(error).__name__}: {error}")
                else:
                    report(_line(record, f"{len(due) - len(waiting)}/{len(due)}"))
    # New workers for the rest. One run at least has failed before, so this ends.
    return missing + _run(untried, results, plan, deadline, report, failures)


def _in_order(runs: list[Run], *, by_experiment: bool) -> list[Run]:
    """The order of `Plan.time_limit`."""
    costs = defaultdict[str, float](float)
    if by_experiment:
        for run in runs:
            costs[run.experiment] += run.cost
    return sorted(runs, key=lambda run: (costs[run.experiment], -run.cost))


def _line(record: Record, count: str) -> str:
    scores = "  ".join(f"{condition}: {score.accuracy:.3f}" for condition, score in record.scores.items())
    seconds = f"{record.seconds:.0f} s, {record.cpu_seconds:.0f} s CPU, {record.device}"
    return f"[{count}] {record.experiment}, {label_of(record.configuration)}, seed {record.seed}: {scores}  ({seconds})"


class _Workers:
    """A pool of processes, or this process alone, behind one interface."""

    def __init__(self, plan: Plan, deadline: float | None) -> None:
        self._plan, self._deadline = plan, deadline
        self._steps: Any = None
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "_Workers":
        if self._plan.workers:
            context = multiprocessing.get_context("spawn")
            self._steps = context.SimpleQueue()
            devices = context.SimpleQueue()
            for device in self._plan.devices():
                devices.put(device)
            self._pool = ProcessPoolExecutor(
                self._plan.workers,
                mp_context=context,
                initializer=_start_worker,
                initargs=(self._plan.load, devices, self._deadline, self._steps),
            )
        else:
            _worker.update(device=self._plan.devices()[0], deadline=self._deadline, steps=None, lost=False)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def submit(self, run: Run) -> "Future[Outcome]":
        if self._pool is not None:
            return self._pool.submit(_work, run)
        future: Future[Outcome] = Future()
        try:
            future.set_result(_work(run))
        except Exception as error:
            future.set_exception(error)
        return future

    def finished_steps(self) -> int:
        steps = 0
        while self._steps is not None and not self._steps.empty():
            steps += self._steps.get()
        return steps


_worker: dict[str, Any] = {}


def _start_worker(load: tuple[Path, ...], devices: Any, deadline: float | None, steps: Any) -> None:
    """Prepare a new process, which takes the next of the devices."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Small matrices: more threads per process cost more than they bring, and one thread always sums in one order.
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    warnings.filterwarnings("ignore", "The value of the smallest subnormal")  # denormals are flushed on purpose
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    for path in load:
        load_rule_file(path)
    device = devices.get()
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    _worker.update(device=device, deadline=deadline, steps=steps)


def _work(run: Run) -> Outcome:
    before = 0

    def progress(step: int) -> None:
        nonlocal before
        if _worker["deadline"] is not None and time.time() > _worker["deadline"]:
            raise OutOfTime
        if _worker["steps"] is not None:
            _worker["steps"].put(step - before)
        before = step

    progress(0)
    if _worker.get("lost"):
        raise Untried
    try:
        return run_configuration(
            run.task,
            parse_configuration(run.configuration),
            run.recipe,
            seed=run.seed,
            device=_worker["device"],
            progress=progress,
        )
    except Exception:  # raised again; whatever it is, it may have cost this process its GPU
        _worker["lost"] = device_is_lost(_worker["device"])
        raise


def device_is_lost(device: str) -> bool:
    """Whether a fault in a kernel has left this process without its GPU."""
    if torch.device(device).type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
