"""Run a suite: do the jobs that its result file lacks, then judge its claims.

    python -m experiments SUITE [--list] [--only NAMES] [--seconds N] [--out FILE] [--device DEVICE]

Examples: `mini --device cpu*2` (three minutes on two CPU cores), `full --device cuda*12` (a dozen processes over all
GPUs), `text --device cuda --seconds 900` (the same command again goes on).
"""

import argparse
import re
from pathlib import Path

import torch

from experiments.runner import missing_jobs, read_lines, run_jobs


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run the suite."""
    parser = argparse.ArgumentParser(
        prog="experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=("mini", "full", "family", "text", "conversions"))
    parser.add_argument("--list", action="store_true", help="name the jobs that are missing, judge, and stop")
    parser.add_argument("--only", default="", help="parts of ids of jobs, comma separated: 'parity', 'kda+neg'")
    parser.add_argument("--seconds", type=float, help="abandon what is not done after so long")
    parser.add_argument("--out", type=Path, help="the result file, runs/SUITE.jsonl unless given")
    parser.add_argument("--device", default="cpu", help="cpu, cuda (all GPUs), cuda:1; *N for N processes over them")
    options = parser.parse_args(arguments)

    if options.suite == "text":
        from experiments.text.suite import jobs, verdicts
        from experiments.text.suite import train_and_score as work
    elif options.suite == "conversions":
        from experiments.text.conversions import convert as work
        from experiments.text.conversions import jobs, verdicts
    else:
        from experiments.lab import train_and_test as work
        from experiments.suites import LABS

        jobs, verdicts = LABS[options.suite].jobs, LABS[options.suite].verdicts

    def wanted(lines):
        names = [name.strip() for name in options.only.split(",")]
        return [job for job in jobs(lines) if any(name in job["id"] for name in names)]

    path = options.out or Path("runs") / f"{options.suite}.jsonl"
    if options.list:
        for job in missing_jobs(wanted(read_lines(path)), read_lines(path)):
            print(job["id"])
    else:
        missing = run_jobs(wanted, work, path, devices=_devices(options.device), seconds=options.seconds)
        print(f"results in {path}; {len(missing)} jobs are missing{': the same command goes on' * bool(missing)}")
    print("\n".join(verdicts(read_lines(path))))


def _devices(text: str) -> list[str]:
    """One device per process."""
    match = re.fullmatch(r"(cpu|cuda|cuda:\d+)(?:\*(\d+))?", text)
    if match is None:
        raise SystemExit(f"--device is cpu, cuda or cuda:N, with *N for N processes, got {text!r}")
    device, count = match[1], int(match[2] or 1)
    every = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if device == "cuda" else [device]
    if not every:
        raise SystemExit("there is no GPU: --device cpu")
    return [every[i % len(every)] for i in range(max(count, len(every)))]


if __name__ == "__main__":
    main()
