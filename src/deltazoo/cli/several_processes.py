"""Run a command of deltazoo in several processes of this machine, one per GPU, through torchrun."""

import os
import sys
from typing import NoReturn

from deltazoo.training.console import say

__all__ = ["number_of_processes", "run_in_processes"]


def number_of_processes() -> int | None:
    """How many processes torchrun or accelerate has started; None if it was neither."""
    processes = os.environ.get("WORLD_SIZE")
    return None if processes is None else int(processes)


def run_in_processes(processes: int, arguments: list[str]) -> NoReturn:
    """Replace this process by torchrun, which runs ``deltazoo`` with these arguments in every process.

    Without a GPU the processes compute on the CPU. Signals and the exit status are torchrun's.

    Raises:
        ValueError: the machine has GPUs, and fewer than that.
    """
    import torch

    gpus = torch.cuda.device_count()
    if 0 < gpus < processes:
        raise ValueError(f"--gpus {processes}: this machine has {gpus} {'GPU' if gpus == 1 else 'GPUs'}")
    if gpus == 0:
        say(f"no GPU: {processes} processes on the CPU")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*torchrun, "-m", "deltazoo", *arguments])
