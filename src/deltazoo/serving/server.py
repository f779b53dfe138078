"""The server: limits of connections, a server in a thread, and one in a process of its own before the engine."""

import asyncio
import gc
import queue
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from deltazoo.serving.http import create_app
from deltazoo.serving.pipe import EngineEnd, RemoteEngine

__all__ = ["background_server", "bind", "run_server", "url_of"]

_BACKLOG = 4096
"""Connections that may wait to be accepted: many, as the engine's queue is what refuses, and with a reason."""
_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients and proxies keep theirs, who would otherwise send a
request on a connection that is just being closed."""
_RECEIVE_TIME = 30.0
"""Seconds in which a request must have come, headers and body."""
_AFTER_THE_ENGINE = 5
"""Seconds in which the HTTP process sends the last responses after the engine has stopped."""


class _Connection(H11Protocol):
    """A connection that is closed where a request takes too long to come, or to make room for another one."""

    most = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 100)

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._receiving: asyncio.TimerHandle | None = None
        self._heard = self.loop.time()
        self._watch()
        if len(self.connections) > self.most:
            others: Any = self.connections
            idle = [other for other in others if other.cycle is None or other.cycle.response_complete]
            min(idle, key=lambda other: other._heard).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        self._heard = self.loop.time()
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        if self._receiving is not None:
            self._receiving.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if self._receiving is None and incomplete:
            self._receiving = self.loop.call_later(_RECEIVE_TIME, self.transport.abort)
        elif self._receiving is not None and not incomplete:
            self._receiving.cancel()
            self._receiving = None


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before the model is loaded: an address that is taken is an error at once.

    Args:
        host: a name or an address of this machine.
        port: 0 takes a free one.

    Raises:
        OSError: no such address here, or another program has it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error


def url_of(address: socket.socket) -> str:
    """The URL of a server at a bound socket."""
    host, port = address.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _config(app: ASGIApp, timeout: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=timeout,
        timeout_keep_alive=_KEEP_ALIVE,
        backlog=_BACKLOG,
    )


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
    server = uvicorn.Server(_config(app, 1))
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
        RuntimeError: the HTTP process has ended.
    """
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
    server = _Server(_config(create_app(engine, **options), _AFTER_THE_ENGINE))
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
