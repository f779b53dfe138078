"""Servers: an engine, its HTTP end, and the pipe between them.

To parse requests, to tokenize and to make text of tokens takes a processor several times as long as running the engine,
and Python runs one thread at a time. So each has a process (`run_server`); notebooks and tests use two threads of one
process (`create_app`, `background_server`). Requests, cancellations and questions go through the pipe with numbers that
the HTTP end chooses; answers come back, and one message per step with the outputs of all requests. Messages are
pickled, so both ends must be the same program.
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
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
from starlette.applications import Starlette
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

_log = logging.getLogger(__name__)

_AFTER_THE_ENGINE = 5
"""Seconds within which the HTTP process sends the last responses after the engine has stopped."""


def _received(pipe: Connection) -> Any:
    """The next message from the other end; None if that has ended or is gone."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _send(pipe: Connection, message: Any) -> None:
    """Send a message; nothing if the other end is gone, which the reader notices."""
    with suppress(OSError):
        pipe.send(message)


class EngineEnd:
    """The engine's end of the pipe, which enters the requests that arrive and sends their outputs.

    Args:
        pipe: connection whose pair the HTTP end has.
        on_ready: function called when that end takes requests.
    """

    def __init__(self, engine: Any, pipe: Connection, on_ready: Callable[[], None] = lambda: None) -> None:
        self._engine, self._pipe, self._on_ready = engine, pipe, on_ready
        # The engine's thread must not wait for a pipe that nobody reads, so a thread of its own sends.
        self._outputs: queue.SimpleQueue[Sequence[tuple[int, Any]] | None] = queue.SimpleQueue()

    def serve(self) -> None:
        """Obey the other end until it is gone, then cancel its requests."""
        threading.Thread(target=self._send_all, name="deltazoo pipe", daemon=True).start()
        while (message := _received(self._pipe)) is not None:
            kind, number, content = message
            if kind == "enter":
                refusal = self._enter(content)
                self._outputs.put([(number, refusal), *((key, refusal) for key, _ in content if refusal)])
            elif kind == "cancel":
                self._engine.cancel([number], self._outputs.put)
            elif kind == "status":
                self._outputs.put([(number, self._engine.status())])
            else:
                self._on_ready()
        self._engine.cancel(None, self._outputs.put)
        self.close()

    def close(self) -> None:
        """Send all outputs, and then the end."""
        self._outputs.put(None)

    def _send_all(self) -> None:
        outputs: Sequence[tuple[int, Any]] | None = ()
        while outputs is not None:
            outputs = self._outputs.get()
            _send(self._pipe, outputs)

    def _enter(self, requests: Sequence[tuple[int, Request]]) -> Exception | None:
        """The error of an engine that does not take requests; None if it takes them."""
        try:
            self._engine.enter(requests, self._outputs.put)
        except (RequestError, QueueFull, EngineStopped) as error:
            return error
        except Exception as error:  # after any error the requests of others continue
            _log.error("requests could not be queued: %s", error, exc_info=error)
            return EngineError(f"the request could not be queued: {error}")
        return None


class RemoteEngine:
    """The HTTP end of the pipe, with the methods of an engine. It runs in one event loop.

    Args:
        connect: function that gives the connection whose pair the `EngineEnd` has.
        tokenizer, max_queue, context_limit: those of the engine.
        on_end: function called when the engine has ended and all its outputs have arrived.
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
        """Functions that take the messages with a number: outputs of a request, or the answer to a question."""
        self._has_ended = False

    def begin(self) -> None:
        """Tell the engine's end that requests are taken, and begin to receive; nothing if that has been done."""
        if self._pipe is None:
            self._pipe = self._connect()
            asyncio.get_running_loop().add_reader(self._pipe, self._receive, self._pipe)
            self._send("ready")

    def close(self) -> None:
        """Close the pipe."""
        if self._pipe is not None:
            asyncio.get_running_loop().remove_reader(self._pipe)
            self._pipe.close()
            self._pipe = None

    async def submit_all(self, requests: Sequence[Request], notify: Callable[[Output], None]) -> list[Stream]:
        """The streams of requests, after queueing all or none of them.

        Args:
            notify: function called with each output of any of them.

        Raises:
            RequestError, QueueFull, EngineStopped: see `Engine.submit`. EngineError: the engine failed on the requests.
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
        """The engine's status; EngineStopped if the engine is gone."""
        return await self._ask("status", {})

    async def _ask(self, kind: str, streams: Mapping[int, Stream]) -> Any:
        self.begin()
        if self._has_ended:
            raise EngineStopped("its engine has ended")
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()

        def receive(content: Any) -> None:
            if answer.done():  # nobody waits for it
                return
            if isinstance(content, Piece):  # the last output of a request
                content = EngineStopped("its engine has ended")
            answer.set_exception(content) if isinstance(content, Exception) else answer.set_result(content)

        self._receivers |= {**{key: stream.put for key, stream in streams.items()}, number: receive}
        self._send(kind, number, [(key, stream.request) for key, stream in streams.items()])
        return await answer

    def _send(self, kind: str, number: int = 0, content: Any = None) -> None:
        if self._pipe is not None:
            _send(self._pipe, (kind, number, content))

    def _receive(self, pipe: Connection) -> None:
        outputs = _received(pipe)
        if outputs is None:  # all outputs have come, or the engine's process is gone
            self._has_ended = True
            asyncio.get_running_loop().remove_reader(pipe)
            outputs = [(number, Piece(finish_reason="cancelled")) for number in self._receivers]
        for number, output in outputs:
            receive = self._receivers.pop(number) if is_last(output) else self._receivers[number]
            receive(output)
        if self._has_ended:
            self._on_end()


def create_app(engine: Any, *, model: str, api_key: str | None = None, max_body: int = MAX_BODY) -> Starlette:
    """The endpoints `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health` and `/metrics` of an engine.

    Args:
        engine: an `Engine`, started and stopped by the caller.
        model: the name by which clients ask for the model.
        api_key: key required of every request but `/health`, as `Authorization: Bearer KEY`; None: no key.
        max_body: most bytes of a request's body; larger ones get status 413.

    Raises:
        ValueError: a key that no header can carry, or a tokenizer of another library than tokenizers.

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
    """A context in which a thread serves an application, for notebooks and tests, with the server's URL as its value.

    The caller starts and stops the engine. The end of the context cuts running requests off.

    Args:
        app: result of `create_app`.
        host: address at which to listen.
        port: port; 0: any free one.
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
    """Serve until SIGINT or SIGTERM. Then accepted requests are finished, and new ones refused.

    Args:
        engine: an `Engine`, started; it is stopped when this returns. It stays in this process, HTTP gets another one.
        options: arguments of `create_app`.
        address: result of `bind`.
        stop_timeout: seconds after a signal within which requests may finish; the rest is cancelled. A second signal
            cancels at once, a third ends this process by the signal's default action.
        ready: function called when connections are accepted.

    Raises:
        ValueError: see `create_app`. RuntimeError: the HTTP process has ended.
    """
    check_tokenizer(engine.tokenizer)
    context = get_context("spawn")  # a fork would inherit the engine's threads and GPU
    ours, theirs = Pipe()
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
    """Exclude the objects of all modules from garbage collections, which take 0.2 s to look at them."""
    gc.collect()
    gc.freeze()


def _serve_http(pipe: Connection, address: socket.socket, facts: dict[str, Any], options: dict[str, Any]) -> None:
    """Run the HTTP process until the engine has ended."""

    def end() -> None:
        server.should_exit = True

    engine = RemoteEngine(lambda: pipe, **facts, on_end=end)
    server = uvicorn.Server(server_config(app_of(engine, **options), _AFTER_THE_ENGINE))
    server.handle_exit = lambda sig, frame: None  # type: ignore[method-assign]  # Ctrl-C reaches all of a terminal
    _leave_alone_what_is_loaded()
    server.run(sockets=[address])
