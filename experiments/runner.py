"""Runner of jobs, dicts with an id, whose results go to a file of JSON lines; what has a line is not done again."""

import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

Job = dict[str, Any]
"""`id`, unique in a suite, and all that decides the result, as plain values."""
Line = dict[str, Any]
"""A job, what its work returned, and how it was run."""
Work = Callable[[Job, str, Callable[[], None]], dict[str, Any]]
"""Work on a job on a device; it calls the third argument now and then, which ends it when the time is over."""


class OutOfTime(Exception):
    """The time limit was reached before the end of a job."""


def read_lines(path: Path) -> list[Line]:
    """All complete lines of a result file; a last line cut short by a killed run is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def missing_jobs(jobs: Iterable[Job], lines: Iterable[Line]) -> list[Job]:
    """The jobs that have no line.

    Raises:
        ValueError: a line has a job's id and other settings.
    """
    done = {line["id"]: line for line in lines if "id" in line}
    missing = []
    for job in jobs:
        line = done.get(job["id"])
        if line is None:
            missing.append(job)
        elif others := [key for key in job if line.get(key) != json.loads(json.dumps(job[key]))]:
            raise ValueError(f"the file has a result of {job['id']!r} with another {', '.join(others)}: name another")
    return missing


def run_jobs(
    jobs: Callable[[list[Line]], list[Job]],
    work: Work,
    path: Path,
    *,
    devices: Sequence[str] = ("cpu",),
    seconds: float | None = None,
    report: Callable[[str], None] = print,
) -> list[Job]:
    """Do what a result file lacks, in order; each line is on disk as soon as it is there.

    Args:
        jobs: what there is to do, given the lines so far: called again when all that it named before is done.
        work: a function of a module, since other processes call it.
        path: of the JSON lines; need not exist.
        devices: a process for each of them; the CPU alone has none of its own.
        seconds: a job that is not done after so long is abandoned and leaves nothing.
        report: called with a line per job.

    Returns:
        The jobs that are missing still.

    Raises:
        RuntimeError: jobs failed; all others were tried.
    """
    deadline = math.inf if seconds is None else time.time() + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # a killed run may have left a part of a line
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    failures: dict[str, str] = {}
    while True:
        lines = read_lines(path)
        missing = missing_jobs(jobs(lines), lines)
        due = [job for job in missing if job["id"] not in failures]
        if not due or time.time() > deadline:
            break
        for count, (job, state, found) in enumerate(_attempts(due, work, list(devices), deadline), start=1):
            if state == "done":
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found, allow_nan=False) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                report(f"[{count}/{len(due)}] {job['id']}: {found['seconds']:.0f} s")
            elif state == "failed":
                failures[job["id"]] = found
                report(f"[{count}/{len(due)}] {job['id']}: FAILED, {found}")
    if failures:
        raise RuntimeError("; ".join(f"{name}: {error}" for name, error in failures.items()))
    return missing


def provenance(device: str) -> dict[str, Any]:
    """Commit, command, versions and processor of this process."""
    root = Path(__file__).resolve().parents[1]
    commands = (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "src", "experiments"])
    commit, changes = (
        subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True).stdout.strip()
        for command in commands
    )
    return {
        "commit": (commit or "unknown") + ("+changes" if changes else ""),
        "command": sys.argv[1:],
        "torch": torch.__version__,
        **{name: version(name) for name in ("triton", "transformers", "deltazoo")},
        "gpu": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None,
    }


def _attempts(jobs: list[Job], work: Work, devices: list[str], deadline: float) -> Iterator[tuple[Job, str, Any]]:
    """(job, "done", its line), (job, "failed", why) or (job, "left", None) in the order in which they end."""
    if devices == ["cpu"]:
        yield from ((job, *_attempt(job, work, "cpu", deadline)) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    free = context.SimpleQueue()
    for device in devices:
        free.put(device)
    with ProcessPoolExecutor(len(devices), context, _start_process, (free,)) as pool:
        futures = {pool.submit(_attempt_in_process, job, work, deadline): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], *future.result()


_process: dict[str, Any] = {"device": "cpu", "lost": False}


def _start_process(free: Any) -> None:
    """Prepare a new process, which takes the next of the devices."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products
    device = _process["device"] = free.get()
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)


def _attempt_in_process(job: Job, work: Work, deadline: float) -> tuple[str, Any]:
    if _process["lost"]:
        return "left", None  # for new processes: an earlier job's kernel has cost this one its GPU
    device = _process["device"]
    state, found = _attempt(job, work, device, deadline)
    if state == "failed" and torch.device(device).type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            _process["lost"] = True
    return state, found


def _attempt(job: Job, work: Work, device: str, deadline: float) -> tuple[str, Any]:
    def tick() -> None:
        if time.time() > deadline:
            raise OutOfTime

    began = time.time()
    try:
        tick()
        found = work(job, device, tick)
    except OutOfTime:
        return "left", None
    except Exception as error:  # raised at the end, so that it does not end the other jobs
        return "failed", f"{type(error).__name__}: {error}"
    spent = {"started": round(began, 1), "seconds": round(time.time() - began, 2), "device": device}
    return "done", {**job, **found, **spent, "run": provenance(device)}
