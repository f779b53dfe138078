"""The pipe between an engine and an HTTP process: what is answered, lost and forgotten; both processes end together.

Whole servers with a model are started and stopped in test_under_load.py; `make processes-test` kills some without.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_engine import FakeEngine, byte_tokenizer, expected_text

REASON = "needs the extras serve and test: pip install 'deltazoo[test]'"
for package in ("fastapi", "uvicorn", "openai", "prometheus_client"):
    pytest.importorskip(package, reason=REASON)
httpx = pytest.importorskip("httpx", reason=REASON)

from deltazoo.serving import EngineError, EngineStopped, Piece, QueueFull, Request, Stream  # noqa: E402
from deltazoo.serving.http import bind  # noqa: E402
from deltazoo.serving.pipe import EngineEnd, RemoteEngine  # noqa: E402


class Linked:
    """An engine behind a pipe."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.ours, self.theirs = Pipe()
        self.is_ready, self.remote_has_ended = threading.Event(), asyncio.Event()
        self.end = EngineEnd(engine, self.ours, on_ready=self.is_ready.set)
        self.serving = threading.Thread(target=self.end.serve)
        self.serving.start()
        facts = engine.tokenizer, engine.max_queue, engine.context_limit
        self.remote = RemoteEngine(lambda: self.theirs, *facts, on_end=self.remote_has_ended.set)
        self.remote.begin()
        assert self.is_ready.wait(5)

    async def submit(self, **options: Any) -> Stream:
        (stream,) = await self.remote.submit_all([request(**options)], lambda output: None)
        return stream


async def pieces_of(stream: Stream) -> list[Piece]:
    return await asyncio.to_thread(list, stream)


@asynccontextmanager
async def linked(engine: FakeEngine) -> AsyncIterator[Linked]:
    with engine:
        link = Linked(engine)
        yield link
        link.end.close()
        await link.remote_has_ended.wait()
        link.remote.close()
        link.serving.join(5)
        assert not link.serving.is_alive()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def request(**options: Any) -> Request:
    return Request(**{"prompt": (5, 6), "max_tokens": 20, "seed": 1} | options)


def test_what_was_made_before_the_end_is_read_although_the_other_end_writes() -> None:
    async def test() -> None:
        async with linked(FakeEngine(byte_tokenizer())) as link:
            stream = await link.submit()
            link.engine.stop()  # this loop does not read meanwhile
            link.end.close()
            time.sleep(0.2)
            late = asyncio.create_task(link.submit())
            pieces = await pieces_of(stream)
            assert sum(len(piece.token_ids) for piece in pieces) == 20 and pieces[-1].finish_reason == "length"
            with pytest.raises(EngineStopped):
                await late

    run(test)


def test_a_request_that_the_engine_fails_on_ends_nothing_else() -> None:
    class Failing(FakeEngine):
        def enter(self, requests: Any, deliver: Any) -> None:
            if requests[0][1].top_k:
                raise ValueError("bytes must be in range(0, 256)")
            super().enter(requests, deliver)

    async def test() -> None:
        async with linked(Failing(byte_tokenizer())) as link:
            stream = await link.submit()
            with pytest.raises(EngineError, match=r"could not be queued: bytes must be in range\(0, 256\)"):
                await link.submit(top_k=5)
            assert (await pieces_of(stream))[-1].finish_reason == "length"
            assert not link.remote._receivers

    run(test)


def test_refused_requests_are_forgotten_though_nobody_waits() -> None:
    async def test() -> None:
        engine = FakeEngine(byte_tokenizer(), places=1, max_queue=1)
        engine.steps = threading.Semaphore(0)
        async with linked(engine) as link:
            running = await link.submit(max_tokens=2)
            for _ in range(5):
                asking = asyncio.create_task(link.submit())
                await asyncio.sleep(0)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            with pytest.raises(QueueFull):
                await link.submit()
            assert [*link.remote._receivers.values()] == [running.put]
            engine.steps.release(100)

    run(test)


@pytest.mark.parametrize("whose", ["engine", "http"])
def test_a_process_that_is_gone_ends_what_runs_in_both(whose: str) -> None:
    async def test() -> None:
        engine = FakeEngine(byte_tokenizer())
        engine.steps = threading.Semaphore(0)
        async with linked(engine) as link:
            stream = await link.submit()
            asked = asyncio.create_task(link.submit())
            await asyncio.sleep(0)
            end = link.ours if whose == "engine" else link.theirs
            with socket.socket(fileno=os.dup(end.fileno())) as lost:
                lost.shutdown(socket.SHUT_RDWR)
            assert [piece.finish_reason for piece in await pieces_of(stream)] == ["cancelled"]
            await asyncio.gather(asked, return_exceptions=True)
            with pytest.raises(EngineStopped):
                await link.remote.status()
            link.serving.join(5)
            engine.steps.release(100)
            assert not link.serving.is_alive() and not link.remote._receivers
        assert engine.finished["cancelled"] >= 1 and not engine.finished["length"]

    run(test)


def test_a_pipe_that_nobody_reads_does_not_hold_up_the_engine() -> None:
    engine, (ours, theirs) = FakeEngine(byte_tokenizer(), seconds=0), Pipe()
    with engine:
        threading.Thread(target=EngineEnd(engine, ours).serve).start()
        theirs.send(("enter", 0, [(number, request(max_tokens=4000)) for number in range(1, 9)]))
        end = time.monotonic() + 30
        while engine.finished["length"] < 8:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert (0, None) in theirs.recv()
        theirs.close()


SERVER = """
import time

from fake_engine import FakeEngine
from transformers import PreTrainedTokenizerFast
from deltazoo.serving import http, pipe

pipe._AFTER_THE_ENGINE = 1
tokenizer = PreTrainedTokenizerFast.from_pretrained("TOKENIZER")
tokenizer.init_kwargs["as large as others"] = "x" * 3_000_000


class Engine(FakeEngine):
    def stop(self, *, timeout=None):
        time.sleep(STOP_TAKES)
        super().stop(timeout=timeout)


with Engine(tokenizer) as engine:
    address = http.bind("127.0.0.1", 0)
    url = http.url_of(address)
    pipe.run_server(engine, {"model": "fake"}, address, stop_timeout=1, ready=lambda: print(url, flush=True))
"""


said: list[str] = []
"""Standard error of the servers."""


@contextmanager
def started(stop_takes: float = 0) -> Iterator[tuple[psutil.Process, str]]:
    """The process with the engine, whose stop takes so many seconds, and the URL."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    folder = tempfile.TemporaryDirectory()
    byte_tokenizer().save_pretrained(folder.name)
    program = SERVER.replace("STOP_TAKES", str(stop_takes)).replace("TOKENIZER", folder.name)
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
        folder.cleanup()


def http_processes(server: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in server.children():
        with suppress(psutil.NoSuchProcess):  # or one whose end has not been seen
            found += [child] if any("spawn_main" in part for part in child.cmdline()) else []
    return found


def test_clients_at_once_get_their_answers_and_the_port_is_free_afterwards() -> None:
    tokenizer = byte_tokenizer()
    with started() as (main, url):
        assert len(http_processes(main)) == 1

        def check(number: int) -> None:
            body = {"prompt": f"number {number}", "max_tokens": 12, "seed": number}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).json()
            asked = Request(prompt=tuple(tokenizer(body["prompt"])["input_ids"]), max_tokens=12)
            assert answer["choices"][0]["text"] == expected_text(asked, number)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(check, range(48)))
        main.send_signal(signal.SIGTERM)
        assert main.wait(20) == 0
        bind("127.0.0.1", int(url.rpartition(":")[2])).close()


@pytest.mark.processes
def test_an_http_process_that_is_killed_ends_the_server_with_a_sentence() -> None:
    with started() as (main, _):
        http_processes(main)[0].kill()
        assert main.wait(30) == 1
    assert "RuntimeError: the HTTP process has ended with status -9" in said[-1]


@pytest.mark.processes
def test_one_that_reads_nothing_does_not_keep_the_server_from_ending() -> None:
    body = {"prompt": ["x"] * 8, "max_tokens": 4000, "stream": True}
    with (
        started() as (main, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False) as response,
    ):
        next(response.iter_raw())
        for process in http_processes(main):
            process.suspend()
        time.sleep(1.5)  # there is output in the pipe
        main.send_signal(signal.SIGTERM)
        assert main.wait(20) == 0


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_third_signal_ends_the_process(number: signal.Signals) -> None:
    with started(stop_takes=60) as (main, _):
        for _ in range(3):
            main.send_signal(number)
            time.sleep(0.3)
        assert main.wait(5) == -number


@pytest.mark.processes
def test_it_ends_with_the_engine_that_is_killed() -> None:
    with started() as (main, url):
        others = http_processes(main)
        main.kill()
        assert psutil.wait_procs(others, timeout=20)[1] == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0
