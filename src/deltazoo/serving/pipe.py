"""The server's two processes, the engine and HTTP, and the pipe between them.

Reading requests, making tokens of text and text of tokens takes a processor several times as long as running the
engine, and Python runs one thread at a time. So each has a process. Down the pipe go requests, cancellations and
questions, with numbers of the HTTP process's choice; up come answers to them, and one message per step with what was
made for all requests. Messages are pickled, so both ends must be the same program.
"""

import asyncio
import gc
import itertools
import logging
import queue
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import uvicorn

from deltazoo.serving.http import create_app, server_config
from deltazoo.serving.requests import (
    EngineError,
    EngineStopped,
    Output,
    Piece,
    QueueFull,
    Request,
    RequestError,
    Status,
    Stream,
    is_last,
)
from deltazoo.serving.text import check_tokenizer

__all__ = ["EngineEnd", "RemoteEngine", "run_server"]

_log = logging.getLogger(__name__)

_AFTER_THE_ENGINE = 5
"""Seconds in which the HTTP process sends the last responses after the engine has stopped."""


class EngineEnd:
    """The engine's end: enters the requests that come, and sends what is made of them.

    Args:
        engine: an `Engine`.
        pipe: to the HTTP process.
        greeting: the first message.
        on_ready: called when that process accepts connections.
        on_end: called when it is gone; its requests have been cancelled then.
    """

    def __init__(
        self, engine: Any, pipe: Connection, greeting: Any, on_ready: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        self._engine, self._pipe, self._on_ready, self._on_end = engine, pipe, on_ready, on_end
        self._running: set[int] = set()
        # The engine's thread must not wait for a pipe that nobody reads, so a thread of its own sends.
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._messages.put(greeting)
        for work in (self._receive_all, self._send_all):
            threading.Thread(target=work, name="deltazoo pipe", daemon=True).start()

    def close(self) -> None:
        """Tell the HTTP process to end, behind everything that has been made."""
        self._messages.put(("end", 0, None))

    def _send_all(self) -> None:
        with suppress(OSError):  # the other end is gone, as `_receive_all` finds, too
            while True:
                self._pipe.send(self._messages.get())

    def _receive_all(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                kind, number, content = self._pipe.recv()
                if kind == "enter":
                    self._messages.put(("answer", number, self._refusal(content)))
                elif kind == "cancel":
                    self._engine.cancel([number], self._deliver)
                elif kind == "status":
                    self._messages.put(("answer", number, self._engine.status()))
                else:
                    self._on_ready()
        self._engine.cancel([*self._running], self._deliver)
        self._on_end()

    def _refusal(self, requests: Sequence[tuple[int, Request]]) -> Exception | None:
        numbers = [number for number, _ in requests]
        self._running.update(numbers)
        try:
            self._engine.enter(requests, self._deliver)
        except Exception as error:  # whatever it is, the requests of others go on
            self._running.difference_update(numbers)
            if isinstance(error, RequestError | QueueFull | EngineStopped):
                return error
            _log.error("requests could not be queued: %s", error, exc_info=error)
            return EngineError(f"the request could not be queued: {error}")
        return None

    def _deliver(self, outputs: Sequence[tuple[int, Output]]) -> None:
        """Called by the engine's thread."""
        self._running.difference_update(number for number, output in outputs if is_last(output))
        self._messages.put(("made", 0, [*outputs]))


class RemoteEngine:
    """The HTTP process's end, in the place of an engine. All of it runs in one event loop, but for a thread that reads.

    Args:
        pipe: to the engine's process.
        tokenizer, max_queue, context_limit: of the engine.
    """

    def __init__(self, pipe: Connection, tokenizer: Any, max_queue: int, context_limit: int | None) -> None:
        self.tokenizer, self.max_queue, self.context_limit = tokenizer, max_queue, context_limit
        self._pipe = pipe
        self._numbers = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._asked: dict[int, tuple[asyncio.Future[Any], Sequence[int]]] = {}
        """Answers that are waited for, and the numbers of the streams that they are about."""
        self._has_ended = False

    def begin(self, on_end: Callable[[], None]) -> None:
        """Say that connections are accepted, and take what comes, until the engine has ended and all has come."""
        self._on_end = on_end
        self._send("ready")
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive_all, args=(loop,), name="deltazoo pipe", daemon=True).start()

    async def submit_all(self, requests: Sequence[Request]) -> list[Stream]:
        """Queue requests, all or none of them.

        Raises:
            RequestError, QueueFull, EngineStopped: see `Engine.submit`. EngineError: it failed on the requests.
        """
        streams: dict[int, Stream] = {}
        for number, request in zip(self._numbers, requests, strict=False):
            streams[number] = Stream(request.with_seed(), partial(self._cancel, number))
        self._streams |= streams
        try:
            await self._ask("enter", [(number, stream.request) for number, stream in streams.items()], [*streams])
        except asyncio.CancelledError:
            for stream in streams.values():
                stream.cancel()
            raise
        return [*streams.values()]

    async def status(self) -> Status:
        """The engine's; raises EngineStopped if its process is gone."""
        return await self._ask("status")

    def _cancel(self, number: int, _: Stream) -> None:
        self._send("cancel", number)

    def _send(self, kind: str, number: int = 0, content: Any = None) -> None:
        with suppress(OSError):  # the other end is gone, as `_receive_all` finds, too
            self._pipe.send((kind, number, content))

    async def _ask(self, kind: str, content: Any = None, streams: Sequence[int] = ()) -> Any:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = answer, streams
        if self._has_ended:
            self._take("answer", number, EngineStopped("its engine has ended"))
        else:
            self._send(kind, number, content)
        return await answer

    def _receive_all(self, loop: asyncio.AbstractEventLoop) -> None:
        kind = ""
        with suppress(RuntimeError):  # the loop has ended
            while kind != "end":
                try:
                    kind, number, content = self._pipe.recv()
                except (EOFError, OSError):  # the engine's process is gone
                    kind, number, content = "end", 0, None
                loop.call_soon_threadsafe(self._take, kind, number, content)

    def _take(self, kind: str, number: int, content: Any) -> None:
        if kind == "made":
            Stream.deliver((self._streams[key], output) for key, output in content)
            for key, output in content:
                if is_last(output):
                    del self._streams[key]
        elif kind == "answer":
            answer, streams = self._asked.pop(number)
            if isinstance(content, Exception):
                for key in streams:
                    del self._streams[key]
            if not answer.done():  # else nobody waits any more
                answer.set_exception(content) if isinstance(content, Exception) else answer.set_result(content)
        else:
            self._has_ended = True
            for asked in [*self._asked]:
                self._take("answer", asked, EngineStopped("its engine has ended"))
            self._take("made", 0, [(key, Piece(finish_reason="cancelled")) for key in self._streams])
            self._on_end()


def run_server(
    engine: Any, options: dict[str, Any], address: socket.socket, *, stop_timeout: float, ready: Callable[[], None]
) -> None:
    """Serve until SIGINT or SIGTERM. What runs or waits then is finished, new requests are refused.

    Args:
        engine: an `Engine`, started; stopped when this returns. It stays in this process, HTTP gets another one.
        options: of `create_app`.
        address: of `bind`.
        stop_timeout: seconds after a signal in which requests may finish; the rest is cancelled. A second signal
            cancels at once, a third one ends this process by the signal's default action.
        ready: called when connections are accepted.

    Raises:
        ValueError: see `create_app`. RuntimeError: the HTTP process has ended.
    """
    check_tokenizer(engine.tokenizer)
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    context = get_context("spawn")  # a fork would have the engine's threads and GPU
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_http, args=(theirs, address), daemon=True)
    process.start()
    theirs.close()
    address.close()
    facts = {name: getattr(engine, name) for name in ("tokenizer", "max_queue", "context_limit")}
    end = EngineEnd(engine, ours, (facts, options), on_ready=ready, on_end=lambda: events.put("gone"))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: events.put("signal"))
    _leave_alone_what_is_loaded()

    def stop(timeout: float) -> None:
        engine.stop(timeout=timeout)
        events.put("stopped")

    signals = 0
    try:
        while (event := events.get()) != "stopped":
            if event == "signal":
                signals += 1
                threading.Thread(target=stop, args=(stop_timeout if signals == 1 else 0,), daemon=True).start()
            elif signals == 0:
                process.join(_AFTER_THE_ENGINE)
                raise RuntimeError(f"the HTTP process has ended with status {process.exitcode}")
            if signals == 2:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
        end.close()
        process.join(_AFTER_THE_ENGINE + 1)
    finally:
        gc.unfreeze()
        process.kill()  # if it still runs
        engine.stop(timeout=0)


def _leave_alone_what_is_loaded() -> None:
    """Take the objects of all modules out of garbage collections, which stop a process for 0.2 s to look at them."""
    gc.collect()
    gc.freeze()


def _serve_http(pipe: Connection, address: socket.socket) -> None:
    """The HTTP process."""
    try:
        facts, options = pipe.recv()
    except EOFError:  # the server was stopped meanwhile
        return
    engine = RemoteEngine(pipe, **facts)
    server = _Server(server_config(create_app(engine, **options), _AFTER_THE_ENGINE))
    server.engine = engine
    _leave_alone_what_is_loaded()
    server.run(sockets=[address])


class _Server(uvicorn.Server):
    """Runs until the engine's process, which signals are for, has ended."""

    engine: RemoteEngine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        self.engine.begin(self._end)

    def _end(self) -> None:
        for server in self.servers:  # at once, as the next server may want the port
            server.close()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ctrl-C reaches every process of a terminal."""
