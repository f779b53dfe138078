"""Run the application with uvicorn until a signal comes, then finish what runs."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

__all__ = ["background_server", "bind", "run_server", "url_of"]

_AFTER_THE_ENGINE = 5.0
"""Seconds in which uvicorn sends the last responses after the engine has stopped."""

_BACKLOG = 4096
"""Connections that may wait to be accepted: many, as the engine's queue is what refuses, and with a reason."""
_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients and proxies keep theirs, who would otherwise send a
request on a connection that is just being closed."""


class Stops(Protocol):
    """An engine that can be stopped."""

    def stop(self, *, timeout: float | None = None) -> None:
        """Finish what runs, and cancel what is left after `timeout` seconds."""


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, before the model is loaded: an address that is taken is an error at once.

    Args:
        host: a name or an address of this machine.
        port: 0 takes a free one.

    Raises:
        OSError: no such address here, or another program has it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart needs no wait
        bound.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error
    return bound


def run_server(
    app: ASGIApp, engine: Stops, address: socket.socket, *, stop_timeout: float, ready: Callable[[], None]
) -> None:
    """Serve until SIGINT or SIGTERM. What runs or waits then is finished, new requests are refused.

    Args:
        app: of `create_app`.
        engine: started; stopped when this returns.
        address: of `bind`.
        stop_timeout: seconds after a signal in which requests may finish; the rest is cancelled. A second signal
            cancels at once.
        ready: called when connections are accepted.
    """
    config = _config(app, int(stop_timeout + _AFTER_THE_ENGINE))
    server = _Server(config, engine, stop_timeout, ready)
    # uvicorn raises the signals again when it is done, for handlers like these.
    before = {number: signal.signal(number, _do_nothing) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[address])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        engine.stop(timeout=0)


@contextmanager
def background_server(app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Inside, a thread serves the application, in a notebook or a test; gives the server's URL.

    The engine is the caller's to start and stop. At the end requests that run are cut off.
    """
    address = bind(host, port)
    server = uvicorn.Server(_config(app, 1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address]}, daemon=True)
    address.listen(_BACKLOG)  # a client may come before uvicorn is ready
    thread.start()
    try:
        yield url_of(address)
    finally:
        server.should_exit = True
        thread.join()


def url_of(address: socket.socket) -> str:
    """The URL of a server at a bound socket."""
    host, port = address.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _config(app: ASGIApp, timeout: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=timeout,
        timeout_keep_alive=_KEEP_ALIVE,
        backlog=_BACKLOG,
    )


class _Server(uvicorn.Server):
    """Tells the engine to stop at the first signal, while connections stay open for what it still makes.

    The second signal cancels what the engine makes, and its clients are told.
    """

    def __init__(self, config: uvicorn.Config, engine: Stops, stop_timeout: float, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine, self._stop_timeout, self._ready = engine, stop_timeout, ready
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals <= 2:
            timeout = self._stop_timeout if self._signals == 1 else 0.0
            threading.Thread(target=self._engine.stop, kwargs={"timeout": timeout}, daemon=True).start()
        if self._signals != 2:  # at another SIGINT uvicorn drops its connections
            super().handle_exit(sig, frame)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass
