"""HTTP servers in processes of their own before one engine.

Reading requests, making tokens of text and text of tokens takes a processor several times as long as running the
engine, and Python runs one thread at a time. So the engine has a process alone: this one, whose main thread passes
messages on. The HTTP processes share the port, and the kernel divides connections among them.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from types import FrameType
from typing import Any

import uvicorn

from deltazoo.serving.engine_link import EngineEnd, RemoteEngine, receive
from deltazoo.serving.http_app import app_before
from deltazoo.serving.http_server import free_after_use, uvicorn_config

__all__ = ["AppSettings", "number_of_processes", "run_server"]

_log = logging.getLogger(__name__)

_AFTER_THE_ENGINE = 5
"""Seconds in which HTTP processes send the last responses after the engine has stopped."""
_BEFORE_ANOTHER = 0.5
"""Seconds before another process takes the place of one that has ended."""


def number_of_processes() -> int:
    """HTTP processes for this machine: one for every two processors, at most eight.

    Connections are divided by chance, and a prompt takes milliseconds to become tokens. So where many come at once, the
    process with the most of them keeps the engine waiting.
    """
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


@dataclass(frozen=True)
class AppSettings:
    """What an HTTP process needs to know."""

    tokenizer: Any
    max_queue: int
    model: str
    api_key: str | None


def run_server(
    engine: Any,
    settings: AppSettings,
    addresses: Sequence[socket.socket],
    *,
    stop_timeout: float,
    ready: Callable[[], None],
) -> None:
    """Serve until SIGINT or SIGTERM. What runs or waits then is finished, new requests are refused.

    Args:
        engine: an `Engine`, started; stopped when this returns.
        settings: of the HTTP processes.
        addresses: of `bind`; each has an HTTP process.
        stop_timeout: seconds after a signal in which requests may finish; the rest is cancelled. A second signal
            cancels at once, a third one ends this process by the signal's default action.
        ready: called when connections are accepted.

    Raises:
        RuntimeError: an HTTP process could not start.
    """
    try:
        _leave_alone_what_is_loaded()
        asyncio.run(_Supervisor(engine, settings, addresses, stop_timeout, ready).run())
    finally:
        gc.unfreeze()
        engine.stop(timeout=0)


def _leave_alone_what_is_loaded() -> None:
    """Take the objects of all modules out of garbage collections, which stop a process for 0.2 s to look at them."""
    gc.collect()
    gc.freeze()


class _Supervisor:
    """Keeps one HTTP process per address alive until a signal comes."""

    def __init__(
        self,
        engine: Any,
        settings: AppSettings,
        addresses: Sequence[socket.socket],
        stop_timeout: float,
        ready: Callable[[], None],
    ) -> None:
        self._engine, self._settings, self._addresses = engine, settings, addresses
        self._stop_timeout, self._ready = stop_timeout, ready
        self._signals = 0
        self._stopped = False
        self._patience = _AFTER_THE_ENGINE + 1
        """Seconds in which an HTTP process may end by itself."""
        self._not_ready = set(addresses)
        self._ends: dict[socket.socket, EngineEnd] = {}
        self._stops: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        await asyncio.gather(*(self._keep_process(address) for address in self._addresses))

    def _stop(self) -> None:
        self._signals += 1
        timeout = self._stop_timeout if self._signals == 1 else 0.0
        self._stops.append(asyncio.create_task(self._stop_after_the_engine(timeout)))
        if self._signals == 2:
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)

    async def _stop_after_the_engine(self, timeout: float) -> None:
        await asyncio.to_thread(self._engine.stop, timeout=timeout)
        self._stopped = True
        for address in self._addresses:
            address.close()
        for end in self._ends.values():
            end.finish()
        await asyncio.sleep(self._patience)
        self._patience = 0
        for end in self._ends.values():  # of processes that read nothing
            end.abort()

    async def _keep_process(self, address: socket.socket) -> None:
        """Start the process, and another one if it ends, until the server stops."""
        context = get_context("spawn")  # a fork would have the engine's threads and GPU
        while True:
            ours, theirs = socket.socketpair()
            # Arguments stay small: a pipe that holds more than it can would be written to until the process reads it.
            process = context.Process(target=_serve_http, args=(theirs, address), daemon=True)
            process.start()
            theirs.close()
            end = await EngineEnd.over(ours, self._engine, lambda: self._is_ready(address), self._settings)
            self._ends[address] = end
            if self._stopped:
                end.finish()
            await end.run()
            await asyncio.to_thread(process.join, self._patience)
            if process.is_alive():
                process.kill()
            if self._signals:
                return
            if address in self._not_ready:
                raise RuntimeError(f"an HTTP process could not start, and ended with status {process.exitcode}")
            _log.error("an HTTP process ended with status %s; another one takes its place", process.exitcode)
            await asyncio.sleep(_BEFORE_ANOTHER)

    def _is_ready(self, address: socket.socket) -> None:
        if address in self._not_ready:
            self._not_ready.remove(address)
            if not self._not_ready:
                self._ready()


def _serve_http(end: socket.socket, address: socket.socket) -> None:
    """An HTTP process."""
    try:
        settings: AppSettings = receive(end)
    except EOFError:  # the server was stopped meanwhile
        return
    free_after_use(address)
    engine = RemoteEngine(end, settings.tokenizer, settings.max_queue)
    app = app_before(engine, model=settings.model, api_key=settings.api_key)
    _leave_alone_what_is_loaded()
    _Server(uvicorn_config(app, _AFTER_THE_ENGINE), engine).run(sockets=[address])


class _Server(uvicorn.Server):
    """Runs as long as the engine's process keeps the connection, which signals are for."""

    def __init__(self, config: uvicorn.Config, engine: RemoteEngine) -> None:
        super().__init__(config)
        self._engine = engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._engine.connect()
        await super().startup(sockets)
        self._reading = asyncio.create_task(self._stop_after_the_engine())
        self._engine.report_ready()

    async def _stop_after_the_engine(self) -> None:
        try:
            await self._engine.run()
        finally:
            for server in self.servers:  # at once, as the next server may want the port
                server.close()
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ctrl-C reaches every process of a terminal."""
