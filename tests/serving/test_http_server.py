"""Addresses; whole servers are started and stopped in test_under_load.py."""

from __future__ import annotations

import select
import socket

import pytest

for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package, reason="needs the extra serve: pip install 'deltazoo[serve]'")

from deltazoo.serving.http_server import bind, free_after_use, url_of  # noqa: E402


@pytest.mark.parametrize("number", [1, 3])
def test_an_address_that_is_taken_is_an_error_at_once(number: int) -> None:
    first = bind("127.0.0.1", 0, number)
    try:
        assert len({url_of(address) for address in first}) == 1 and len(first) == number
        for address in first:
            address.listen()
        port = first[0].getsockname()[1]
        assert url_of(first[0]) == f"http://127.0.0.1:{port}"
        for others in (1, 2):
            with pytest.raises(OSError, match=rf"cannot listen at 127\.0\.0\.1, port {port}: .*in use"):
                bind("127.0.0.1", port, others)
    finally:
        for address in first:
            address.close()
    with pytest.raises(OSError, match=r"cannot listen at no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


def test_an_address_is_taken_before_several_listen_and_free_after_use() -> None:
    first = bind("127.0.0.1", 0, 2)
    port = first[0].getsockname()[1]
    for others in (1, 2):
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", port, others)
    for address in first:
        free_after_use(address)
        address.listen()
    for others in (1, 2):
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", port, others)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"x")
        ready, _, _ = select.select(first, [], [], 5)
        served, _ = ready[0].accept()
        served.recv(1)
        served.close()  # the side that closes first keeps the address for a minute
        assert client.recv(1) == b""
    for address in first:
        address.close()
    for number in (2, 1):
        for address in bind("127.0.0.1", port, number):
            address.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    try:
        (address,) = bind("::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6 address of its own")
    with address:
        assert url_of(address) == f"http://[::1]:{address.getsockname()[1]}"
