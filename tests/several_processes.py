"""Run a function in several CPU processes that are torch.distributed ranks to each other."""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["transformers", "deltazoo.training.run"])  # imported once for all


def run_in_processes(count: int, function: Callable[..., Any], *arguments: Any, timeout: float = 240) -> list[Any]:
    """Call a function of a module in `count` processes with the environment that torchrun sets.

    Returns:
        What each rank returns.

    Raises:
        AssertionError: a rank raised; the message holds its traceback. TimeoutError: a rank did not end in time.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    results = _CONTEXT.SimpleQueue()
    ranks = [
        _CONTEXT.Process(target=_run, args=(rank, count, port, results, function, arguments)) for rank in range(count)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    try:
        for process in ranks:
            process.join(timeout)
            if process.exitcode is None:
                raise TimeoutError(f"a rank did not end within {timeout} s")
        while not results.empty():
            rank, value, error = results.get()
            assert error is None, f"rank {rank}:\n{error}"
            found[rank] = value
    finally:
        for process in ranks:
            process.kill()
    assert len(found) == count, [process.exitcode for process in ranks]
    return [found[rank] for rank in range(count)]


def run_script(count: int, path: Path, *arguments: str, timeout: float = 300) -> str:
    """What `python path arguments` prints in `count` processes, that of the first rank first."""
    return "".join(run_in_processes(count, _run_script, path, arguments, timeout=timeout))


def _run_script(path: Path, arguments: tuple[str, ...]) -> str:
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *arguments]
    with redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            assert not end.code, said.getvalue()
    return said.getvalue()


def _run(
    rank: int, count: int, port: int, results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ.update(zip(names, map(str, (rank, rank, count, count, "localhost", port)), strict=True))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        results.put((rank, function(*arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
