"""Addresses, and a server in a thread."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

__all__ = ["background_server", "bind", "free_after_use", "url_of", "uvicorn_config"]

_BACKLOG = 4096
"""Connections that may wait to be accepted: many, as the engine's queue is what refuses, and with a reason."""
_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients and proxies keep theirs, who would otherwise send a
request on a connection that is just being closed."""


def bind(host: str, port: int, number: int = 1) -> list[socket.socket]:
    """Sockets at one address, before the model is loaded: an address that is taken is an error at once.

    Args:
        host: a name or an address of this machine.
        port: 0 takes a free one.
        number: of sockets; the kernel divides connections among those that listen.

    Raises:
        OSError: no such address here, or another program has it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        alone = _bound(family, address)
        if number == 1:
            return [alone]
        address = alone.getsockname()
        alone.close()  # no other program has it, and ours may have it several times
        return [_bound(family, address, socket.SO_REUSEPORT) for _ in range(number)]
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error


def free_after_use(bound: socket.socket) -> None:
    """Before a socket of several listens: its connections will not keep the address from the next server.

    Until then it lacks the option, so that a second server that starts while this one loads finds the address taken.
    """
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _bound(family: int, address: tuple[Any, ...], option: int = socket.SO_REUSEADDR) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


@contextmanager
def background_server(app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Context in which a thread serves an application, for notebooks and tests; gives the server's URL.

    The caller starts and stops the engine. At the end running requests are cut off.

    Args:
        app: from `create_app`.
        host: address to listen at.
        port: 0: any free one.
    """
    (address,) = bind(host, port)
    server = uvicorn.Server(uvicorn_config(app, 1))
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


def uvicorn_config(app: ASGIApp, timeout: int) -> uvicorn.Config:
    """uvicorn's settings; `timeout`: seconds in which responses may be sent once the server has been told to stop."""
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=timeout,
        timeout_keep_alive=_KEEP_ALIVE,
        backlog=_BACKLOG,
    )
