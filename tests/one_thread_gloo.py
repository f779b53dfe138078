"""gloo with one thread, for the workers of tests that gather through torch's functional collectives or DTensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["ONE_THREAD_GLOO"]

ONE_THREAD_GLOO = "one_thread_gloo"
"""Name of the backend. Torch gives gloo two threads, and no argument for another number.

Each thread stores the name of the collective that it completed in the same std::string without a lock
(ProcessGroupGloo::runLoop, torch 2.13). That of functional gathers, ALLGATHER_COALESCED, is long enough to lie on the
heap: two threads free it at once, and the process ends with "malloc(): unaligned tcache chunk detected".
"""


def _made(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._timeout, options._threads = timeout, 1
    return dist.ProcessGroupGloo(store, rank, size, options)


dist.Backend.register_backend(ONE_THREAD_GLOO, _made, devices=["cpu"])
