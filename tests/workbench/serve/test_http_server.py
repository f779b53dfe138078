"""Addresses; whole servers are started and stopped in test_under_load.py."""

from __future__ import annotations

import socket

import pytest

for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package, reason="needs the extra serve: pip install 'deltazoo[serve]'")

from deltazoo.workbench.serve.http_server import bind, url_of  # noqa: E402


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


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    try:
        (address,) = bind("::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6 address of its own")
    with address:
        assert url_of(address) == f"http://[::1]:{address.getsockname()[1]}"
