"""Addresses, and an HTTP process before an engine: both end together, whatever ends one of them.

Whole servers with a model are started and stopped in test_under_load.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_engine import byte_tokenizer, expected_text

REASON = "needs the extras serve and test: pip install 'deltazoo[test]'"
for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason=REASON)
httpx = pytest.importorskip("httpx", reason=REASON)

from deltazoo.serving import Request  # noqa: E402
from deltazoo.serving.server import bind, url_of  # noqa: E402

SERVER = """
import time

from fake_engine import FakeEngine, byte_tokenizer
from deltazoo.serving import server

server._AFTER_THE_ENGINE = 1
tokenizer = byte_tokenizer()
tokenizer.init_kwargs["as large as others"] = "x" * 3_000_000


class Engine(FakeEngine):
    def stop(self, *, timeout=None):
        time.sleep(STOP_TAKES)
        super().stop(timeout=timeout)


with Engine(tokenizer) as engine:
    address = server.bind("127.0.0.1", 0)
    url = server.url_of(address)
    server.run_server(engine, {"model": "fake"}, address, stop_timeout=1, ready=lambda: print(url, flush=True))
"""


said: list[str] = []
"""Standard error of the servers."""


@contextmanager
def started(stop_takes: float = 0) -> Iterator[tuple[psutil.Process, str]]:
    """The process with the engine, whose stop takes so many seconds, and the URL."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    program = SERVER.replace("STOP_TAKES", str(stop_takes))
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        url = process.stdout.readline().strip()
        assert url, process.stderr.read()
        yield psutil.Process(process.pid), url
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in http_processes(psutil.Process(process.pid)):
                child.kill()
        process.kill()
        said.append(process.communicate()[1])


@pytest.fixture
def server() -> Iterator[tuple[psutil.Process, str]]:
    with started() as found:
        yield found


def http_processes(server: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in server.children():
        with suppress(psutil.NoSuchProcess):  # or one whose end has not been seen
            found += [child] if any("spawn_main" in part for part in child.cmdline()) else []
    return found


def test_clients_at_once_get_their_answers_and_the_port_is_free_afterwards(server: Any) -> None:
    main, url = server
    assert len(http_processes(main)) == 1
    tokenizer = byte_tokenizer()

    def check(number: int) -> None:
        body = {"prompt": f"number {number}", "max_tokens": 12, "seed": number}
        text = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).json()["choices"][0]["text"]
        request = Request(prompt=tuple(tokenizer(body["prompt"])["input_ids"]), max_tokens=12)
        assert text == expected_text(request, number)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(check, range(48)))
    main.send_signal(signal.SIGTERM)
    assert main.wait(20) == 0
    bind("127.0.0.1", int(url.rpartition(":")[2])).close()


def test_an_http_process_that_is_killed_ends_the_server_with_a_sentence() -> None:
    with started() as (main, _):
        http_processes(main)[0].kill()
        assert main.wait(30) == 1
    assert "RuntimeError: the HTTP process has ended with status -9" in said[-1]


def test_one_that_reads_nothing_does_not_keep_the_server_from_ending(server: tuple[psutil.Process, str]) -> None:
    main, url = server
    body = {"prompt": ["x"] * 8, "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        next(response.iter_raw())
        for process in http_processes(main):
            process.suspend()
        time.sleep(1.5)  # there is output in the pipe
        main.send_signal(signal.SIGTERM)
        assert main.wait(20) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_third_signal_ends_the_process(number: signal.Signals) -> None:
    with started(stop_takes=60) as (main, _):
        for _ in range(3):
            main.send_signal(number)
            time.sleep(0.3)
        assert main.wait(5) == -number


def test_it_ends_with_the_engine_that_is_killed(server: tuple[psutil.Process, str]) -> None:
    main, url = server
    others = http_processes(main)
    main.kill()
    assert psutil.wait_procs(others, timeout=20)[1] == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0


def test_an_address_that_is_taken_is_an_error_at_once() -> None:
    """While the first server loads its model, too."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError, match=rf"cannot listen at 127\.0\.0\.1, port {port}: .*in use"):
            bind("127.0.0.1", port)
    with pytest.raises(OSError, match=r"cannot listen at no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


def test_an_address_is_free_after_use() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"x")
            served, _ = first.accept()
            served.recv(1)
            served.close()  # the side that closes first keeps the address for a minute
            assert client.recv(1) == b""
    bind("127.0.0.1", port).close()


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    try:
        address = bind("::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6 address of its own")
    with address:
        assert url_of(address) == f"http://[::1]:{address.getsockname()[1]}"
