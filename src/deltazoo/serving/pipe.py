"""The pipe between the engine's process and the HTTP process.

Reading requests, making tokens of text and text of tokens takes a processor several times as long as running the
engine, and Python runs one thread at a time. So each has a process. Down the pipe go requests, cancellations and
questions, with numbers of the HTTP process's choice; up come answers to them, and one message per step with what was
made for all requests. Messages are pickled, so both ends must be the same program.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

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

__all__ = ["EngineEnd", "RemoteEngine"]

_log = logging.getLogger(__name__)


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
