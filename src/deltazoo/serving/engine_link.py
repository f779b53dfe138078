"""The two ends of a socket between an engine and an HTTP server in another process.

An HTTP process sends requests, cancellations and questions, each with the numbers that it gives its requests. The
engine's process answers requests and questions in the order in which they came, and sends what is made: one message per
step, for all requests of the HTTP process. Messages are pickled, so both ends must be the same program.

At the end the engine's process sends nothing more, the HTTP process reads what is left, and closes the connection.
"""

import asyncio
import itertools
import logging
import pickle
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
)

__all__ = ["EngineEnd", "RemoteEngine", "receive"]

_log = logging.getLogger(__name__)
_LENGTH = 4
"""Bytes before a message that say how long it is."""


@dataclass(frozen=True)
class _Ready:
    """The HTTP process accepts connections."""


@dataclass(frozen=True)
class _Enter:
    requests: list[tuple[int, Request]]


@dataclass(frozen=True)
class _Cancel:
    number: int


@dataclass(frozen=True)
class _AskStatus:
    pass


@dataclass(frozen=True)
class _Answer:
    """To `_Enter`: None or why not; to `_AskStatus`: a Status."""

    content: Status | Exception | None


@dataclass(frozen=True)
class _Made:
    outputs: list[tuple[int, Output]]


def receive(end: socket.socket) -> Any:
    """The first message, where no event loop runs yet.

    Raises:
        EOFError: the other end is gone.
    """
    return pickle.loads(_exactly(end, int.from_bytes(_exactly(end, _LENGTH), "big")))


def _exactly(end: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        part = end.recv(count - len(content))
        if not part:
            raise EOFError("the other end is gone")
        content += part
    return bytes(content)


class _Link:
    """Messages over a stream socket, each behind its length."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._finished = False

    @staticmethod
    async def over(end: socket.socket) -> "_Link":
        return _Link(*await asyncio.open_connection(sock=end))

    def send(self, message: Any) -> None:
        self.send_encoded(self.encoded(message))

    @staticmethod
    def encoded(message: Any) -> bytes:
        content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        return len(content).to_bytes(_LENGTH, "big") + content

    def send_encoded(self, message: bytes) -> None:
        if not (self._finished or self._writer.is_closing()):  # else the other end is gone, and `messages` says so
            self._writer.write(message)

    async def messages(self) -> AsyncIterator[Any]:
        """What comes, until the other end closes or is gone."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
                yield pickle.loads(await self._reader.readexactly(length))

    def finish(self) -> None:
        """Send nothing more; what has been sent is still read."""
        if not (self._finished or self._writer.is_closing()):
            self._finished = True
            self._writer.write_eof()

    def close(self) -> None:
        """Close, once everything has been sent."""
        self._writer.close()

    def abort(self) -> None:
        """Close at once."""
        self._writer.transport.abort()


class EngineEnd:
    """The engine's end: enters the requests of one HTTP process, and sends what is made of them.

    Args:
        engine: an `Engine`.
        link: to the HTTP process.
        ready: called when the HTTP process accepts connections.
    """

    def __init__(self, engine: Any, link: _Link, ready: Callable[[], None]) -> None:
        self._engine, self._link, self._ready = engine, link, ready
        self._loop = asyncio.get_running_loop()
        self._running: set[int] = set()

    @staticmethod
    async def over(end: socket.socket, engine: Any, ready: Callable[[], None], greeting: Any) -> "EngineEnd":
        """At one end of a socket pair; the greeting is what the other end gets by `receive`."""
        link = await _Link.over(end)
        link.send(greeting)
        return EngineEnd(engine, link, ready)

    async def run(self) -> None:
        """Serve until the HTTP process closes the connection or is gone. Requests that it leaves are cancelled."""
        try:
            async for message in self._link.messages():
                self._take(message)
        finally:
            self._link.close()
            self._engine.cancel(self._running, self._deliver)

    def finish(self) -> None:
        """Send nothing more, by which the HTTP process knows that it is to end."""
        self._link.finish()

    def abort(self) -> None:
        """End the connection, whatever the HTTP process does."""
        self._link.abort()

    def _take(self, message: Any) -> None:
        match message:
            case _Enter(requests):
                self._link.send(_Answer(self._refusal(requests)))
            case _Cancel(number):
                self._engine.cancel([number], self._deliver)
            case _AskStatus():
                self._link.send(_Answer(self._engine.status()))
            case _Ready():
                self._ready()

    def _refusal(self, requests: list[tuple[int, Request]]) -> Exception | None:
        try:
            self._engine.enter(requests, self._deliver)
        except (RequestError, QueueFull, EngineStopped) as error:
            return error
        except Exception as error:  # whatever it is, the requests of others go on
            _log.error("requests could not be queued: %s", error, exc_info=error)
            return EngineError(f"the request could not be queued: {error}")
        self._running.update(number for number, _ in requests)
        return None

    def _deliver(self, outputs: Sequence[tuple[int, Output]]) -> None:
        """Called by the engine's thread."""
        message = _Link.encoded(_Made([*outputs]))
        ended = [number for number, output in outputs if _is_last(output)]
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._send_made, message, ended)

    def _send_made(self, message: bytes, ended: Sequence[int]) -> None:
        self._running.difference_update(ended)
        self._link.send_encoded(message)


class RemoteEngine:
    """The HTTP process's end, in the place of an engine.

    Args:
        end: of a socket pair.
        tokenizer: of the model.
        max_queue: of the engine.
    """

    def __init__(self, end: socket.socket, tokenizer: Any, max_queue: int) -> None:
        self.tokenizer, self.max_queue = tokenizer, max_queue
        self._end = end
        self._numbers = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._asked: deque[tuple[asyncio.Future[Status | None], Sequence[int]]] = deque()
        """Answers that are waited for, and the numbers of the requests that they are about."""
        self._connected = False

    async def connect(self) -> None:
        """Before anything else, in the event loop that everything runs in."""
        self._link = await _Link.over(self._end)
        self._connected = True

    def report_ready(self) -> None:
        """Tell the engine's process that connections are accepted."""
        self._link.send(_Ready())

    async def run(self) -> None:
        """Take what the engine sends, until its process closes the connection or is gone."""
        async for message in self._link.messages():
            if isinstance(message, _Made):
                Stream.deliver((self._streams[number], output) for number, output in message.outputs)
                for number, output in message.outputs:
                    if _is_last(output):
                        del self._streams[number]
            else:
                self._take_answer(message.content)
        self._connected = False
        self._link.close()
        Stream.deliver((stream, Piece(finish_reason="cancelled")) for stream in self._streams.values())
        while self._asked:
            self._take_answer(_gone())

    async def submit_all(self, requests: Sequence[Request]) -> list[Stream]:
        """Queue requests, all or none of them.

        Raises:
            RequestError, QueueFull, EngineStopped: see `Engine.submit`. EngineError: it failed on the requests.
        """
        streams: dict[int, Stream] = {}
        for request in requests:
            number = next(self._numbers)
            streams[number] = Stream(request.with_seed(), partial(self._cancel, number))
        self._streams |= streams
        try:
            await self._ask(_Enter([(number, stream.request) for number, stream in streams.items()]), [*streams])
        except asyncio.CancelledError:
            for stream in streams.values():
                stream.cancel()
            raise
        return [*streams.values()]

    async def status(self) -> Status:
        """The engine's.

        Raises:
            EngineStopped: its process is gone.
        """
        status = await self._ask(_AskStatus())
        assert status is not None
        return status

    def _cancel(self, number: int, _: Stream) -> None:
        self._link.send(_Cancel(number))

    async def _ask(self, message: Any, numbers: Sequence[int] = ()) -> Status | None:
        answer: asyncio.Future[Status | None] = asyncio.get_running_loop().create_future()
        self._asked.append((answer, numbers))
        if self._connected:
            self._link.send(message)
        else:
            self._take_answer(_gone())
        return await answer

    def _take_answer(self, content: Status | Exception | None) -> None:
        answer, numbers = self._asked.popleft()
        if isinstance(content, Exception):
            for number in numbers:
                del self._streams[number]
        if answer.done():  # nobody waits any more
            return
        if isinstance(content, Exception):
            answer.set_exception(content)
        else:
            answer.set_result(content)


def _gone() -> EngineStopped:
    return EngineStopped("its engine has ended")


def _is_last(output: Output) -> bool:
    return isinstance(output, EngineError) or (isinstance(output, Piece) and output.finish_reason is not None)
