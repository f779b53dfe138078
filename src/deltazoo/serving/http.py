"""The HTTP server: the endpoints of OpenAI's API before an engine, and its connections.

A client that hangs up cancels its request here: `_until_hang_up` while a prompt becomes tokens and a whole answer is
waited for, `_EventStream` for streamed answers.
"""

import asyncio
import json
import re
import resource
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from inspect import isawaitable
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from deltazoo.serving.api import Answer, ApiError, ChatBody, CompletionBody
from deltazoo.serving.metrics import METRICS_TYPE, Metrics
from deltazoo.serving.requests import EngineError, EngineStopped, Piece, QueueFull, RequestError, Status
from deltazoo.serving.text import PromptTokens, TextStream, check_tokenizer

__all__ = ["background_server", "bind", "check_key", "create_app", "server_config", "url_of"]

MAX_BODY = 4_000_000
"""Bytes of a request's body at most, unless told otherwise."""
_PAUSE = 0.0005
"""Seconds between two pieces of a stream, per stream that has begun. Sending a piece takes about an eighth of it, so
the event loop leaves most of the interpreter's time to others; tokens made meanwhile become one piece."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies are to pass every event on at once; nginx does it by the second one."""
_BACKLOG = 4096
"""Connections that may wait to be accepted: many, as the engine's queue is what refuses, and with a reason."""
_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients and proxies keep theirs, who would otherwise send a
request on a connection that is just being closed."""
_RECEIVE_TIME = 30.0
"""Seconds in which a request must have come, headers and body."""


_NOBODY = Response(status_code=499)
"""To a client that has hung up."""


def create_app(engine: Any, *, model: str, api_key: str | None = None, max_body: int = MAX_BODY) -> FastAPI:
    """The endpoints `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health` and `/metrics` of an engine.

    Args:
        engine: an `Engine`, started and stopped by the caller.
        model: the name under which clients ask for it.
        api_key: required of every request but `/health`, as `Authorization: Bearer KEY`; None: no key.
        max_body: most bytes of a request's body; others get status 413.

    Raises:
        ValueError: a key that no header can carry, or a tokenizer that is not of the tokenizers library.

    Example:
        ```python
        with Engine(model, tokenizer) as engine:
            uvicorn.run(create_app(engine, model="my-model"))
        ```
    """
    check_key(api_key)
    check_tokenizer(engine.tokenizer)
    app = FastAPI(title="deltazoo", docs_url=None, redoc_url=None)  # those pages load scripts from elsewhere
    app.add_middleware(_Gate, api_key=api_key, max_body=max_body)

    async def of_http(request: HTTPRequest, error: Any) -> JSONResponse:
        return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()

    async def of_others(request: HTTPRequest, error: Exception) -> JSONResponse:
        return ApiError.of(error).response()

    app.add_exception_handler(HTTPException, of_http)
    for kind in (ApiError, RequestValidationError, QueueFull, RequestError, EngineStopped, EngineError, Exception):
        app.add_exception_handler(kind, of_others)
    endpoints = _Endpoints(engine, model)
    app.post("/v1/completions")(endpoints.completions)
    app.post("/v1/chat/completions")(endpoints.chat_completions)
    app.get("/v1/models")(endpoints.models)
    app.get("/v1/models/{name:path}")(endpoints.model_named)
    app.get("/health")(endpoints.health)
    app.get("/metrics")(endpoints.metrics)
    return app


def check_key(key: str | None) -> None:
    """Raise ValueError for a key that no header can carry."""
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise ValueError(
            "the API key is sent in a header, so it must be printable ASCII characters without spaces, at least one: "
            f"got {len(key)} characters" + (", of which some are not" if key else "")
        )


class _Endpoints:
    def __init__(self, engine: Any, model: str) -> None:
        self._engine, self._model, self._tokenizer = engine, model, engine.tokenizer
        self._prompts = PromptTokens(engine.tokenizer, engine.context_limit)
        self._metrics = Metrics(model)
        self._created = int(time.time())
        self._open = 0

    async def completions(self, body: CompletionBody, http: HTTPRequest) -> Response:
        """Continue prompts."""
        self._check_model(body.model)

        async def answer() -> Response:
            prompts = [await self._prompts.of_text(x) if isinstance(x, str) else x for x in body.prompt]
            echoes = None
            if body.echo:
                texts = [x if isinstance(x, str) else await self._prompts.text_of(x) for x in body.prompt]
                echoes = [text for text in texts for _ in range(body.n)]
            return await self._answer(body, prompts, echoes)

        return await _until_hang_up(http.receive, answer()) or _NOBODY

    async def chat_completions(self, body: ChatBody, http: HTTPRequest) -> Response:
        """The next message of a chat."""
        self._check_model(body.model)
        if not self._tokenizer.chat_template:
            raise ApiError(
                400,
                f"{self._model} has no chat template, so it does not say how messages become a prompt: "
                "use /v1/completions, or save a tokenizer with a chat template beside the model",
                code="no_chat_template",
            )

        async def answer() -> Response:
            messages = [message.for_template() for message in body.messages]
            return await self._answer(body, [await self._prompts.of_chat(messages, body.chat_template_kwargs)])

        return await _until_hang_up(http.receive, answer()) or _NOBODY

    async def models(self) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [await self.model_named(self._model)]}

    async def model_named(self, name: str) -> dict[str, Any]:
        """The model by its name."""
        self._check_model(name)
        return {"id": name, "object": "model", "created": self._created, "owned_by": "deltazoo"}

    async def health(self) -> Response:
        """200 while the engine takes requests, else 503."""
        try:
            running = (await self._status()).running
        except EngineStopped:
            running = False
        return JSONResponse({"status": "ok" if running else "stopped"}, 200 if running else 503)

    async def metrics(self) -> Response:
        """The engine's counters in Prometheus' text format."""
        return PlainTextResponse(self._metrics.text(await self._status()), media_type=METRICS_TYPE)

    async def _status(self) -> Status:
        status = self._engine.status()
        return await status if isawaitable(status) else status

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model):
            message = f"there is no model {name!r} here, only {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _answer(
        self, body: CompletionBody | ChatBody, prompts: Sequence[list[int]], echoes: Sequence[str] | None = None
    ) -> Response:
        """Run the requests of all choices, and respond at once or in pieces."""
        requests = [request for prompt in prompts for request in body.requests(prompt)]
        if len(requests) > (most := self._engine.max_queue):
            raise ApiError(400, f"this request makes {len(requests)} choices, and at most {most} can wait here")
        submitted = self._engine.submit_all(requests)
        submitted = await submitted if isawaitable(submitted) else submitted
        streams = [TextStream(stream, self._tokenizer, body.stop) for stream in submitted]
        answer = Answer(body, self._model, self._tokenizer, streams, echoes)
        if body.stream:
            return _EventStream(self._events(answer), streams)
        found: list[list[Piece]] = [[] for _ in streams]
        try:
            async for index, piece in self._merged(streams):
                found[index].append(piece)
        finally:
            _cancel(streams)
        return Response(answer.whole([*map(Piece.joined, found)]), media_type="application/json")

    async def _events(self, answer: Answer) -> AsyncIterator[bytes]:
        try:
            async for index, piece in self._merged(answer.streams):
                yield format_sse_event(data_str=answer.chunk(index, piece))
            if (last := answer.last_chunk()) is not None:
                yield format_sse_event(data_str=last)
        except (EngineError, ApiError) as error:  # the status has been sent
            yield format_sse_event(data_str=json.dumps(ApiError.of(error).body))
        yield format_sse_event(data_str="[DONE]")

    async def _merged(self, streams: Sequence[TextStream]) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces with the number of their stream, and pauses between them that grow with the number of streams."""
        found: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

        async def forward(index: int, stream: TextStream) -> None:
            began, reason = time.monotonic(), "cancelled"
            self._open += 1
            try:
                async for piece in stream:
                    if piece.finish_reason == "cancelled":
                        raise ApiError(503, "the server stopped before the request was finished", code="stopping")
                    if stream.completion_tokens == len(piece.token_ids):
                        self._metrics.time_to_first_token.observe(time.monotonic() - began)
                    found.put_nowait((index, piece))
                    stream.pause(_PAUSE * self._open)
                    reason = piece.finish_reason or reason
            except Exception as error:
                reason = "error" if isinstance(error, EngineError) else reason
                found.put_nowait((index, error))
            finally:
                self._open -= 1
                self._metrics.finished[reason].inc()
                self._metrics.request_seconds.observe(time.monotonic() - began)

        readers = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
        try:
            left = len(streams)
            while left:
                index, news = await found.get()
                if isinstance(news, Exception):
                    raise news
                left -= news.finish_reason is not None
                yield index, news
        finally:
            for reader in readers:
                reader.cancel()


class _EventStream(EventSourceResponse):
    """Ends the requests when the response ends, whatever ends it."""

    def __init__(self, events: AsyncIterator[bytes], streams: Sequence[TextStream]) -> None:
        super().__init__(events, headers=_HEADERS)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_hang_up(receive, self.stream_response(send))
        finally:
            _cancel(self._streams)


async def _until_hang_up(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of work; None where the client has closed its connection, by which work is cancelled."""

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(hang_up())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0] in done else None
    finally:
        for task in tasks:
            task.cancel()


def _cancel(streams: Sequence[TextStream]) -> None:
    for stream in streams:
        stream.cancel()


class _Gate:
    """Refuses requests without the key, and bodies that are too large, before anything is made of them."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with 401 or 413."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        if scope["path"] != "/health" and not self._has_key(headers.get("authorization", "")):
            error = ApiError(401, "give the server's API key as Authorization: Bearer KEY", code="invalid_api_key")
            return await error.response()(scope, receive, send)
        length = int(headers.get("content-length", 0))
        body, more = bytearray(), length <= self._max_body
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False) and len(body) <= self._max_body
        if max(length, len(body)) > self._max_body:
            error = ApiError(413, f"the body is too large: at most {self._max_body} bytes are read, see --max-body")
            return await error.response()(scope, receive, send)
        parts: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return parts.pop() if parts else await receive()

        await self._app(scope, replay, send)

    def _has_key(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        return self._key is None or (
            scheme.lower() == "bearer" and secrets.compare_digest(key.strip().encode(), self._key)
        )


class _Connection(H11Protocol):
    """A connection that is closed where a request takes too long to come, or to make room for another one."""

    most = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 100)

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._receiving: asyncio.TimerHandle | None = None
        self._heard = self.loop.time()
        self._watch()
        if len(self.connections) > self.most:
            others: Any = self.connections
            idle = [other for other in others if other.cycle is None or other.cycle.response_complete]
            min(idle, key=lambda other: other._heard).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        self._heard = self.loop.time()
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        if self._receiving is not None:
            self._receiving.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if self._receiving is None and incomplete:
            self._receiving = self.loop.call_later(_RECEIVE_TIME, self.transport.abort)
        elif self._receiving is not None and not incomplete:
            self._receiving.cancel()
            self._receiving = None


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before the model is loaded: an address that is taken is an error at once.

    Args:
        host: a name or an address of this machine.
        port: 0 takes a free one.

    Raises:
        OSError: no such address here, or another program has it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error


def url_of(address: socket.socket) -> str:
    """The URL of a server at a bound socket."""
    host, port = address.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: ASGIApp, timeout: int) -> uvicorn.Config:
    """uvicorn's settings; `timeout`: seconds in which responses may be sent once the server has been told to stop."""
    return uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=timeout,
        timeout_keep_alive=_KEEP_ALIVE,
        backlog=_BACKLOG,
    )


@contextmanager
def background_server(app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Context in which a thread serves an application, for notebooks and tests; gives the server's URL.

    The caller starts and stops the engine. At the end running requests are cut off.

    Args:
        app: from `create_app`.
        host: address to listen at.
        port: 0: any free one.
    """
    address = bind(host, port)
    server = uvicorn.Server(server_config(app, 1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address]}, daemon=True)
    thread.start()
    try:
        yield url_of(address)
    finally:
        server.should_exit = True
        thread.join()
