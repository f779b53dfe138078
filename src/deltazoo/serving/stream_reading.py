"""From the engine's streams to HTTP: whole answers, server-sent events, and what happens when a client hangs up."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from deltazoo.serving.api_errors import ApiError, api_error_of
from deltazoo.serving.api_responses import Answer
from deltazoo.serving.metrics_text import Metrics
from deltazoo.serving.requests import EngineError, Piece
from deltazoo.serving.text_assembly import TextStream

__all__ = ["StreamReader"]

_PAUSE = 0.0005
"""Seconds between two pieces of a stream, per stream that has begun. Sending a piece takes about an eighth of it, so
the event loop leaves most of the interpreter's time to the engine's thread; tokens made meanwhile become one piece."""

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies are to pass every event on at once; nginx does it by the second one."""


class StreamReader:
    """Reads the streams of one server."""

    def __init__(self, metrics: Metrics) -> None:
        self._open, self._metrics = 0, metrics

    async def whole(self, streams: Sequence[TextStream], http: HTTPRequest) -> list[Piece]:
        """All output of each stream as one piece; a client that hangs up ends the requests.

        Raises:
            ApiError: the engine stopped before the end. EngineError: the model failed.
        """
        async with _cancelled_on_hang_up(http, streams):
            return await asyncio.gather(*map(self._whole, streams))

    def event_stream(
        self, streams: Sequence[TextStream], answer: Answer, usage: Callable[[], dict[str, Any]] | None
    ) -> StreamingResponse:
        """A response of server-sent events; `usage` makes the content of the last one."""
        return _EventStream(self._events(streams, answer, usage), streams)

    async def _whole(self, stream: TextStream) -> Piece:
        return Piece.joined([piece async for piece in self._pieces(stream)])

    async def _events(
        self, streams: Sequence[TextStream], answer: Answer, usage: Callable[[], dict[str, Any]] | None
    ) -> AsyncIterator[bytes]:
        try:
            began = [choice for index in range(len(streams)) if (choice := answer.begin(index)) is not None]
            if began:
                yield _event(answer.chunk(began))
            async for index, piece in self._merged(streams):
                choice = answer.part(index, piece)
                if piece.finish_reason is not None:
                    choice["seed"] = streams[index].seed
                yield _event(answer.chunk([choice]))
            if usage is not None:
                yield _event(answer.chunk([], usage()))
        except (EngineError, ApiError) as error:  # the status has been sent
            yield _event(api_error_of(error).body)
        yield b"data: [DONE]\n\n"

    async def _merged(self, streams: Sequence[TextStream]) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces of several streams with the number of their stream, as they come."""
        if len(streams) == 1:
            async for piece in self._pieces(streams[0]):
                yield 0, piece
            return
        found: asyncio.Queue[tuple[int, Piece | None]] = asyncio.Queue()

        async def forward(index: int, stream: TextStream) -> None:
            try:
                async for piece in self._pieces(stream):
                    found.put_nowait((index, piece))
            finally:
                found.put_nowait((index, None))

        readers = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
        try:
            ended = 0
            while ended < len(streams):
                index, news = await found.get()
                if news is None:
                    await readers[index]  # raises what ended it
                    ended += 1
                else:
                    yield index, news
        finally:
            for reader in readers:
                reader.cancel()

    async def _pieces(self, stream: TextStream) -> AsyncIterator[Piece]:
        """The stream's pieces, with pauses between them that grow with the number of streams."""
        begun, arrived = False, time.monotonic()
        try:
            async for piece in stream:
                if piece.finish_reason == "cancelled":
                    raise ApiError(503, "the server stopped before the request was finished", code="stopping")
                if not begun:
                    self._metrics.time_to_first_token.observe(time.monotonic() - arrived)
                self._open += not begun
                begun = True
                yield piece
                if piece.finish_reason is None:
                    await asyncio.sleep(_PAUSE * self._open)
        finally:
            self._open -= begun
            self._metrics.request_seconds.observe(time.monotonic() - arrived)


class _EventStream(StreamingResponse):
    """Ends the requests when the response ends, whatever ends it."""

    def __init__(self, events: AsyncIterator[bytes], streams: Sequence[TextStream]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._streams)


@asynccontextmanager
async def _cancelled_on_hang_up(http: HTTPRequest, streams: Sequence[TextStream]) -> AsyncIterator[None]:
    """Inside, a client that closes its connection ends the requests, and so does any error."""

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        _cancel(streams)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        _cancel(streams)


def _cancel(streams: Sequence[TextStream]) -> None:
    for stream in streams:
        stream.cancel()


def _event(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"
