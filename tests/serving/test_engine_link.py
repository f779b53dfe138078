"""The socket between an engine and an HTTP process: what is answered, lost and forgotten."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from fake_engine import FakeEngine, byte_tokenizer

from deltazoo.serving import EngineError, EngineStopped, QueueFull, Request
from deltazoo.serving.engine_link import EngineEnd, RemoteEngine, receive


class Linked:
    """An engine behind a link, whose end runs in a thread."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self._ours, theirs = socket.socketpair()
        self.thread = threading.Thread(target=asyncio.run, args=(self._pass_on(),))
        self.thread.start()
        assert receive(theirs) == "hello"
        self.remote = RemoteEngine(theirs, engine.tokenizer, engine.max_queue)

    async def _pass_on(self) -> None:
        self.end = await EngineEnd.over(self._ours, self.engine, lambda: None, "hello")
        await self.end.run()

    def finish(self) -> None:
        with suppress(RuntimeError):  # it has ended
            self.end._loop.call_soon_threadsafe(self.end.finish)


@asynccontextmanager
async def linked(engine: FakeEngine) -> AsyncIterator[Linked]:
    with engine:
        link = Linked(engine)
        await link.remote.connect()
        reading = asyncio.create_task(link.remote.run())
        yield link
        link.finish()
        await reading
        link.thread.join()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def request(**options: Any) -> Request:
    return Request(**{"prompt": (5, 6), "max_tokens": 20, "seed": 1} | options)


def test_what_was_made_before_the_end_is_read_although_the_other_end_writes() -> None:
    async def test() -> None:
        async with linked(FakeEngine(byte_tokenizer())) as link:
            (stream,) = await link.remote.submit_all([request()])
            link.engine.stop()  # this loop does not read meanwhile
            link.finish()
            link.thread.join(0.2)
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


def test_a_connection_that_is_gone_cancels_what_runs() -> None:
    async def test() -> None:
        engine = FakeEngine(byte_tokenizer())
        engine.steps = threading.Semaphore(0)
        async with linked(engine) as link:
            (stream,) = await link.remote.submit_all([request()])
            link.end._loop.call_soon_threadsafe(link.end.abort)
            assert [piece.finish_reason async for piece in stream] == ["cancelled"]
            with pytest.raises(EngineStopped):
                await link.remote.status()
            engine.steps.release(100)

    run(test)
