"""HTTP processes before one engine: they share the port, are replaced when they die, and end with the engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
from deltazoo.serving.http_server import bind  # noqa: E402

PROCESSES = 2
SERVER = f"""
import time

from fake_engine import FakeEngine, byte_tokenizer
from deltazoo.serving import http_processes
from deltazoo.serving.http_server import bind, url_of

http_processes._AFTER_THE_ENGINE = 1
tokenizer = byte_tokenizer()
tokenizer.init_kwargs["as large as others"] = "x" * 3_000_000


class Engine(FakeEngine):
    def stop(self, *, timeout=None):
        time.sleep(STOP_TAKES)
        super().stop(timeout=timeout)


with Engine(tokenizer) as engine:
    addresses = bind("127.0.0.1", 0, {PROCESSES})
    settings = http_processes.AppSettings(tokenizer, 256, "fake", None)
    said = lambda: print(url_of(addresses[0]), flush=True)
    http_processes.run_server(engine, settings, addresses, stop_timeout=1, ready=said)
"""


@contextmanager
def started(stop_takes: float = 0) -> Iterator[tuple[psutil.Process, str]]:
    """The process with the engine, whose stop takes so many seconds, and the URL."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
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
        process.communicate()


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


def in_time(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def check_answers(url: str) -> None:
    """Every request has a connection of its own, which the kernel gives to some process."""
    tokenizer = byte_tokenizer()

    def check(number: int) -> None:
        body = {"prompt": f"number {number}", "max_tokens": 12, "seed": number}
        text = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).json()["choices"][0]["text"]
        request = Request(prompt=tuple(tokenizer(body["prompt"])["input_ids"]), max_tokens=12)
        assert text == expected_text(request, number)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(check, range(48)))


def test_one_that_is_killed_is_replaced(server: tuple[psutil.Process, str]) -> None:
    main, url = server
    before = http_processes(main)
    assert len(before) == PROCESSES
    check_answers(url)
    before[0].kill()
    in_time(lambda: before[0] not in http_processes(main))
    in_time(lambda: len(http_processes(main)) == PROCESSES)
    check_answers(url)
    assert before[1] in http_processes(main)
    main.send_signal(signal.SIGTERM)
    assert main.wait(20) == 0
    bind("127.0.0.1", int(url.rpartition(":")[2]))[0].close()


def test_one_that_is_killed_while_it_starts_is_replaced_too(server: tuple[psutil.Process, str]) -> None:
    main, url = server
    before = http_processes(main)
    before[0].kill()
    in_time(lambda: set(http_processes(main)) - set(before))
    (replacement,) = set(http_processes(main)) - set(before)
    replacement.kill()
    in_time(lambda: len({*http_processes(main)} - {*before, replacement}) == 1)
    check_answers(url)
    main.send_signal(signal.SIGTERM)
    assert main.wait(20) == 0


def test_one_that_reads_nothing_does_not_keep_the_server_from_ending(server: tuple[psutil.Process, str]) -> None:
    main, url = server
    body = {"prompt": ["x"] * 8, "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        next(response.iter_raw())
        for process in http_processes(main):
            process.suspend()
        time.sleep(1.5)  # there is output in the socket
        main.send_signal(signal.SIGTERM)
        assert main.wait(20) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_third_signal_ends_the_process(number: signal.Signals) -> None:
    with started(stop_takes=60) as (main, _):
        for _ in range(3):
            main.send_signal(number)
            time.sleep(0.3)
        assert main.wait(5) == -number


def test_they_end_with_the_engine_that_is_killed(server: tuple[psutil.Process, str]) -> None:
    main, url = server
    others = http_processes(main)
    check_answers(url)
    main.kill()
    assert psutil.wait_procs(others, timeout=20)[1] == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0
