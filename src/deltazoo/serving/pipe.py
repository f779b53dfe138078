"""Servers: an engine, HTTP, and the pipe between them.

Reading requests, making tokens of text and text of tokens takes a processor several times as long as running the
engine, and Python runs one thread at a time. So each has a process (`run_server`); for notebooks and tests two threads
of one process do (`create_app`, `background_server`). Down the pipe go requests, cancellations and questions, with
numbers of the HTTP end's choice; up come answers to them, and one message per step with what was made for all requests.
Messages are pickled, so both ends must be the same program.
"""

import asyncio
import gc
import itertools
import logging
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from deltazoo.serving.http import MAX_BODY, app_of, bind, server_config, url_of
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

__all__ = ["EngineEnd", "RemoteEngine", "background_server", "create_app", "run_server"]

_log = logging.getLogger(__name__)

_AFTER_THE_ENGINE = 5
"""Seconds in which the HTTP process sends the last responses after the engine has stopped."""


class EngineEnd:
    """The engine's end: enters the requests that come, and sends what is made of them.

    Args:
        engine: an `Engine`.
        pipe: to the HTTP end.
        on_ready: called when that end takes requests.
    """

    def __init__(self, engine: Any, pipe: Connection, on_ready: Callable[[], None] = lambda: None) -> None:
        self._engine, self._pipe, self._on_ready = engine, pipe, on_ready
        # The engine's thread must not wait for a pipe that nobody reads, so a thread of its own sends.
        self._messages: queue.SimpleQueue[Sequence[tuple[int, Any]] | None] = queue.SimpleQueue()

    def serve(self) -> None:
        """Do what the other end asks for until it is gone, and then cancel its requests."""
        threading.Thread(target=self._send_all, name="deltazoo pipe", daemon=True).start()
        with suppress(EOFError, OSError):
            while True:
                kind, number, content = self._pipe.recv()
                if kind == "enter":
                    refusal = self._enter(content)
                    self._messages.put([(number, refusal), *((key, refusal) for key, _ in content if refusal)])
                elif kind == "cancel":
                    self._engine.cancel([number], self._messages.put)
                elif kind == "status":
                    self._messages.put([(number, self._engine.status())])
                else:
                    self._on_ready()
        self._engine.cancel(None, self._messages.put)
        self.close()

    def close(self) -> None:
        """Tell the other end to end, behind everything that has been made."""
        self._messages.put(None)

    def _send_all(self) -> None:
        with suppress(OSError):  # the other end is gone, as `serve` finds, too
            while (message := self._messages.get()) is not None:
                self._pipe.send(message)
            self._pipe.send(None)

    def _enter(self, requests: Sequence[tuple[int, Request]]) -> Exception | None:
        """The reason why the engine does not take requests, if it does not."""
        try:
            self._engine.enter(requests, self._messages.put)
        except (RequestError, QueueFull, EngineStopped) as error:
            return error
        except Exception as error:  # whatever it is, the requests of others go on
            _log.error("requests could not be queued: %s", error, exc_info=error)
            return EngineError(f"the request could not be queued: {error}")
        return None


class RemoteEngine:
    """The HTTP end, in the place of an engine. All of it runs in one event loop.

    Args:
        connect: gives the pipe to the `EngineEnd`.
        tokenizer, max_queue, context_limit: of the engine.
        on_end: called when the engine has ended, and all that it has made has come.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        tokenizer: Any,
        max_queue: int,
        context_limit: int | None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.tokenizer, self.max_queue, self.context_limit = tokenizer, max_queue, context_limit
        self._connect, self._on_end = connect, on_end
        self._pipe: Connection | None = None
        self._numbers = itertools.count()
        self._receivers: dict[int, Callable[[Any], None]] = {}
        """Functions that take what comes for a number: outputs of a request, or the answer to a question."""
        self._has_ended = False

    def begin(self) -> None:
        """Say that requests are taken, and take what comes; nothing if that has been done."""
        if self._pipe is None:
            self._pipe = self._connect()
            asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._receive, self._pipe)
            self._send("ready")

    def close(self) -> None:
        """Leave the engine."""
        if self._pipe is not None:
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._pipe.close()
            self._pipe = None

    async def submit_all(self, requests: Sequence[Request], notify: Callable[[Output], None]) -> list[Stream]:
        """Queue requests, all or none of them.

        Args:
            requests: to queue.
            notify: called with each output of any of them.

        Raises:
            RequestError, QueueFull, EngineStopped: see `Engine.submit`. EngineError: it failed on the requests.
        """
        streams: dict[int, Stream] = {}
        for number, request in zip(self._numbers, requests, strict=False):
            streams[number] = Stream(request.with_seed(), partial(self._send, "cancel", number), notify)
        try:
            await self._ask("enter", streams)
        except asyncio.CancelledError:
            for stream in streams.values():
                stream.cancel()
            raise
        return [*streams.values()]

    async def status(self) -> Status:
        """The engine's; raises EngineStopped if it is gone."""
        return await self._ask("status", {})

    async def _ask(self, kind: str, streams: Mapping[int, Stream]) -> Any:
        self.begin()
        if self._has_ended:
            raise EngineStopped("its engine has ended")
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()

        def receive(content: Any) -> None:
            if answer.done():  # nobody waits any more
                return
            if isinstance(content, Piece):  # as requests get
                content = EngineStopped("its engine has ended")
            answer.set_exception(content) if isinstance(content, Exception) else answer.set_result(content)

        self._receivers |= {**{key: stream.put for key, stream in streams.items()}, number: receive}
        self._send(kind, number, [(key, stream.request) for key, stream in streams.items()])
        return await answer

    def _send(self, kind: str, number: int = 0, content: Any = None) -> None:
        if self._pipe is not None:
            with suppress(OSError):  # the other end is gone, as `_receive` finds, too
                self._pipe.send((kind, number, content))

    def _receive(self, pipe: Connection) -> None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):  # the engine's process is gone
            message = None
        if message is None:
            self._has_ended = True
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            message = [(number, Piece(finish_reason="cancelled")) for number in self._receivers]
        for number, output in message:
            receive = self._receivers.pop(number) if is_last(output) else self._receivers[number]
            receive(output)
        if self._has_ended:
            self._on_end()


def create_app(engine: Any, *, model: str, api_key: str | None = None, max_body: int = MAX_BODY) -> FastAPI:
    """The endpoints `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health` and `/metrics` of an engine.

    Args:
        engine: an `Engine`, started and stopped by the caller.
        model: the name under which clients ask for it.
        api_key: required of every request but `/health`, as `Authorization: Bearer KEY`; None: no key.
        max_body: most bytes of a request's body; others get status 413.

    Raises:
        ValueError: a key that no header can carry, or a tokenizer that is not of the tokenizers library.

    Example:
        ```python
        with Engine(model, tokenizer) as engine:
            uvicorn.run(create_app(engine, model="my-model"))
        ```
    """

    def connect() -> Connection:
        ours, theirs = Pipe()
        threading.Thread(target=EngineEnd(engine, ours).serve, name="deltazoo pipe", daemon=True).start()
        return theirs

    return app_of(RemoteEngine(connect, **_facts(engine)), model=model, api_key=api_key, max_body=max_body)


@contextmanager
def background_server(app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Context in which a thread serves an application, for notebooks and tests; gives the server's URL.

    The caller starts and stops the engine. At the end running requests are cut off.

    Args:
        app: from `create_app`.
        host: address to listen at.
        port: 0: any free one.
    """
    address = bind(host, port)
    server = uvicorn.Server(server_config(app, 1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address]}, daemon=True)
    thread.start()
    try:
        yield url_of(address)
    finally:
        server.should_exit = True
        thread.join()


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
    context = get_context("spawn")  # a fork would have the engine's threads and GPU
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_http, args=(theirs, address, _facts(engine), options), daemon=True)
    process.start()
    theirs.close()
    address.close()
    end = EngineEnd(engine, ours, ready)
    signals = 0

    def stop(timeout: float) -> None:
        engine.stop(timeout=timeout)
        end.close()
        process.join(_AFTER_THE_ENGINE + 1)
        process.kill()  # if it still runs

    def on_signal(*_: object) -> None:
        nonlocal signals
        signals += 1
        threading.Thread(target=stop, args=(stop_timeout if signals == 1 else 0,), daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM) if signals == 2 else ():
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    _leave_alone_what_is_loaded()
    try:
        end.serve()
        process.join(_AFTER_THE_ENGINE)
        if not signals:
            raise RuntimeError(f"the HTTP process has ended with status {process.exitcode}")
    finally:
        gc.unfreeze()
        process.kill()
        engine.stop(timeout=0)


def _facts(engine: Any) -> dict[str, Any]:
    return {name: getattr(engine, name) for name in ("tokenizer", "max_queue", "context_limit")}


def _leave_alone_what_is_loaded() -> None:
    """Take the objects of all modules out of garbage collections, which stop a process for 0.2 s to look at them."""
    gc.collect()
    gc.freeze()


def _serve_http(pipe: Connection, address: socket.socket, facts: dict[str, Any], options: dict[str, Any]) -> None:
    """The HTTP process, which runs until the engine has ended."""

    def end() -> None:
        server.should_exit = True

    engine = RemoteEngine(lambda: pipe, **facts, on_end=end)
    server = uvicorn.Server(server_config(app_of(engine, **options), _AFTER_THE_ENGINE))
    server.handle_exit = lambda sig, frame: None  # type: ignore[method-assign]  # Ctrl-C reaches all of a terminal
    _leave_alone_what_is_loaded()
    server.run(sockets=[address])
