"""The pipe between an engine and an HTTP process: what is answered, lost and forgotten."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_engine import FakeEngine, byte_tokenizer

from deltazoo.serving import EngineError, EngineStopped, QueueFull, Request
from deltazoo.serving.pipe import EngineEnd, RemoteEngine


class Linked:
    """An engine behind a pipe."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.ours, theirs = multiprocessing.Pipe()
        self.is_ready, self.is_over = threading.Event(), threading.Event()
        self.end = EngineEnd(engine, self.ours, "hello", on_ready=self.is_ready.set, on_end=self.is_over.set)
        assert theirs.recv() == "hello"
        self.remote = RemoteEngine(theirs, engine.tokenizer, engine.max_queue, engine.context_limit)
        self.remote_has_ended = asyncio.Event()
        self.remote.begin(self.remote_has_ended.set)
        assert self.is_ready.wait(5)


@asynccontextmanager
async def linked(engine: FakeEngine) -> AsyncIterator[Linked]:
    with engine:
        link = Linked(engine)
        yield link
        link.end.close()
        await link.remote_has_ended.wait()
        link.remote._pipe.close()
        assert link.is_over.wait(5)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def request(**options: Any) -> Request:
    return Request(**{"prompt": (5, 6), "max_tokens": 20, "seed": 1} | options)


def test_what_was_made_before_the_end_is_read_although_the_other_end_writes() -> None:
    async def test() -> None:
        async with linked(FakeEngine(byte_tokenizer())) as link:
            (stream,) = await link.remote.submit_all([request()])
            link.engine.stop()  # this loop does not read meanwhile
            link.end.close()
            time.sleep(0.2)
            late = asyncio.create_task(link.remote.submit_all([request()]))
            pieces = [piece async for piece in stream]
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
            (stream,) = await link.remote.submit_all([request()])
            with pytest.raises(EngineError, match=r"could not be queued: bytes must be in range\(0, 256\)"):
                await link.remote.submit_all([request(top_k=5)])
            assert [piece async for piece in stream][-1].finish_reason == "length"
            assert not link.remote._streams

    run(test)


def test_refused_requests_are_forgotten_though_nobody_waits() -> None:
    async def test() -> None:
        engine = FakeEngine(byte_tokenizer(), places=1, max_queue=1)
        engine.steps = threading.Semaphore(0)
        async with linked(engine) as link:
            running = await link.remote.submit_all([request(max_tokens=2)])
            for _ in range(5):
                asking = asyncio.create_task(link.remote.submit_all([request()]))
                await asyncio.sleep(0)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            with pytest.raises(QueueFull):
                await link.remote.submit_all([request()])
            assert [*link.remote._streams.values()] == running
            engine.steps.release(100)

    run(test)


def cut(pipe: Any) -> None:
    """What becomes of a pipe whose process at the other end is killed."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("whose", ["engine", "http"])
def test_a_process_that_is_gone_ends_what_runs_in_both(whose: str) -> None:
    async def test() -> None:
        engine = FakeEngine(byte_tokenizer())
        engine.steps = threading.Semaphore(0)
        async with linked(engine) as link:
            (stream,) = await link.remote.submit_all([request()])
            asked = asyncio.create_task(link.remote.submit_all([request()]))
            await asyncio.sleep(0)
            cut(link.ours if whose == "engine" else link.remote._pipe)
            assert [piece.finish_reason async for piece in stream] == ["cancelled"]
            await asyncio.gather(asked, return_exceptions=True)
            with pytest.raises(EngineStopped):
                await link.remote.status()
            assert link.is_over.wait(5)
            engine.steps.release(100)
            assert not link.remote._streams and not link.remote._asked
        assert engine.finished["cancelled"] >= 1 and not engine.finished["length"]

    run(test)


def test_a_pipe_that_nobody_reads_does_not_hold_up_the_engine() -> None:
    engine, (ours, theirs) = FakeEngine(byte_tokenizer(), seconds=0), multiprocessing.Pipe()
    with engine:
        EngineEnd(engine, ours, "hello", on_ready=lambda: None, on_end=lambda: None)
        theirs.send(("enter", 0, [(number, request(max_tokens=4000)) for number in range(1, 9)]))
        end = time.monotonic() + 30
        while engine.finished["length"] < 8:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert theirs.recv() == "hello" and theirs.recv() == ("answer", 0, None)
        theirs.close()
