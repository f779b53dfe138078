"""Addresses, and what signals do; whole servers are started and stopped in test_under_load.py."""

from __future__ import annotations

import signal
import socket
import threading

import pytest

for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package, reason="needs the extra serve: pip install 'deltazoo[serve]'")

from deltazoo.workbench.serve.http_server import _config, _Server, bind, url_of  # noqa: E402


class StopCounter:
    def __init__(self) -> None:
        self.timeouts: list[float | None] = []
        self.called = threading.Semaphore(0)

    def stop(self, *, timeout: float | None = None) -> None:
        self.timeouts.append(timeout)
        self.called.release()


def test_signals_finish_then_cancel_then_drop() -> None:
    engine = StopCounter()
    server = _Server(_config(lambda scope, receive, send: None, 1), engine, 30.0, lambda: None)
    for timeouts in ([30.0], [30.0, 0.0]):
        server.handle_exit(signal.SIGINT, None)
        assert engine.called.acquire(timeout=5)
        assert (engine.timeouts, server.should_exit, server.force_exit) == (timeouts, True, False)
    server.handle_exit(signal.SIGINT, None)
    assert server.force_exit and len(engine.timeouts) == 2


def test_an_address_that_is_taken_is_an_error_at_once() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError, match=rf"cannot listen at 127\.0\.0\.1, port {port}: .*in use"):
            bind("127.0.0.1", port)
    with pytest.raises(OSError, match=r"cannot listen at no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    try:
        address = bind("::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6 address of its own")
    with address:
        assert url_of(address) == f"http://[::1]:{address.getsockname()[1]}"
