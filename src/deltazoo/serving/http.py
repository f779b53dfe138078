"""HTTP: the endpoints of OpenAI's API, `/health` and `/metrics` of an engine, and connections.

If a client closes its connection, `_Gate` cancels the task of its request; the end of that task, for any reason,
cancels the requests in the engine (`_Endpoints._answer`).
"""

import asyncio
import re
import resource
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import h11
import uvicorn
from fastapi.sse import EventSourceResponse
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from deltazoo.serving.api import Answer, ApiError, ChatBody, CompletionBody, event_of
from deltazoo.serving.requests import (
    EngineError,
    EngineStopped,
    Output,
    Piece,
    QueueFull,
    RequestError,
    Status,
    is_last,
)
from deltazoo.serving.text import PromptTokens, TextStream, check_tokenizer

MAX_BODY = 4_000_000
"""Most bytes of a request's body by default."""
_PAUSE = 0.00075
"""Seconds between two pieces of a stream, per stream that has begun. A piece takes 0.1 to 0.2 ms of the event loop,
most of it one call of the system, so three quarters of its time are left for requests; tokens made meanwhile become one
piece."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that ask proxies to pass every event on at once; nginx obeys the second."""
_BACKLOG = 4096
"""Connections that may wait to be accepted. They are many, so that the engine's queue refuses, with a reason."""
_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open. It is longer than the time of clients and proxies, who would otherwise
send a request on a connection that is about to close."""
_RECEIVE_TIME = 30.0
"""Seconds within which a request must arrive, headers and body."""


def app_of(engine: Any, *, model: str, api_key: str | None = None, max_body: int = MAX_BODY) -> Starlette:
    """The application of `create_app` for a `RemoteEngine`."""
    check_key(api_key)
    check_tokenizer(engine.tokenizer)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.begin()
        yield
        engine.close()

    async def refuse(request: HTTPRequest, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return ApiError.of(error).response()

    endpoints = _Endpoints(engine, model)
    kinds = HTTPException, ApiError, QueueFull, RequestError, EngineStopped, EngineError, Exception
    return Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.models),
            Route("/health", endpoints.health),
            Route("/metrics", endpoints.metrics),
        ],
        middleware=[Middleware(_Gate, api_key=api_key, max_body=max_body)],
        exception_handlers=dict.fromkeys(kinds, refuse),
        lifespan=lifespan,
    )


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
        self._metrics = _Metrics(model)
        self._created = int(time.time())
        self._open = 0
        """Number of choices that are being made."""

    async def completions(self, request: HTTPRequest) -> Response:
        body = CompletionBody.of(await request.body(), request.headers)
        self._check_model(body.model)
        prompts = [await self._prompts.of_text(x) if isinstance(x, str) else x for x in body.prompt]
        echoes = None
        if body.echo:
            texts = [x if isinstance(x, str) else await self._prompts.text_of(x) for x in body.prompt]
            echoes = [text for text in texts for _ in range(body.n)]
        return await self._answer(body, prompts, echoes)

    async def chat_completions(self, request: HTTPRequest) -> Response:
        body = ChatBody.of(await request.body(), request.headers)
        self._check_model(body.model)
        if not self._tokenizer.chat_template:
            raise ApiError(
                400,
                f"{self._model} has no chat template, so it does not say how messages become a prompt: "
                "use /v1/completions, or put its template beside the model, as chat_template.jinja",
                code="no_chat_template",
            )
        messages = [message.for_template() for message in body.messages]
        return await self._answer(body, [await self._prompts.of_chat(messages, body.chat_template_kwargs)])

    async def models(self, request: HTTPRequest) -> Response:
        """The list of models, which has one, or the model of a name."""
        name = request.path_params.get("name")
        self._check_model(name)
        model = {"id": self._model, "object": "model", "created": self._created, "owned_by": "deltazoo"}
        return JSONResponse({"object": "list", "data": [model]} if name is None else model)

    async def health(self, _: HTTPRequest) -> Response:
        """Status 200 while the engine takes requests, else 503."""
        try:
            running = (await self._engine.status()).running
        except EngineStopped:
            running = False
        return JSONResponse({"status": "ok" if running else "stopped"}, 200 if running else 503)

    async def metrics(self, _: HTTPRequest) -> Response:
        return PlainTextResponse(self._metrics.text(await self._engine.status()), media_type=CONTENT_TYPE_LATEST)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model):
            message = f"there is no model {name!r} here, only {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _answer(
        self, body: CompletionBody | ChatBody, prompts: Sequence[list[int]], echoes: Sequence[str] | None = None
    ) -> Response:
        requests = [request for prompt in prompts for request in body.requests(prompt)]
        if len(requests) > (most := self._engine.max_queue):
            raise ApiError(400, f"this request makes {len(requests)} choices, and at most {most} can wait here")
        news, last = asyncio.Event(), asyncio.Event()

        def notify(output: Output) -> None:
            news.set()
            if is_last(output):
                last.set()

        def cancel_all(_: object) -> None:
            for stream in streams:
                stream.cancel()

        streams = await self._engine.submit_all(requests, notify)
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(cancel_all)
        choices = [TextStream(stream, self._tokenizer, body.stop) for stream in streams]
        answer = Answer(body, self._model, self._tokenizer, choices, echoes)
        pieces = self._pieces(choices, news, last)
        if body.stream:
            return _Events(self._events(answer, pieces), headers=_HEADERS)
        found: list[list[Piece]] = [[] for _ in choices]
        async with aclosing(pieces):
            async for index, piece in pieces:
                found[index].append(piece)
        return Response(answer.whole([*map(Piece.joined, found)]), media_type="application/json")

    async def _events(self, answer: Answer, pieces: AsyncGenerator[tuple[int, Piece]]) -> AsyncIterator[bytes]:
        try:
            async with aclosing(pieces):
                async for index, piece in pieces:
                    yield answer.event(index, piece)
            end = answer.last_event()
        except (EngineError, ApiError) as error:  # the status has been sent
            end = event_of(to_json(ApiError.of(error).body))
        yield end + event_of(b"[DONE]")

    async def _pieces(
        self, choices: Sequence[TextStream], news: asyncio.Event, last: asyncio.Event
    ) -> AsyncGenerator[tuple[int, Piece]]:
        """Pieces with the number of their choice, with pauses in between that grow with the number of open choices."""
        began, left, reason = time.monotonic(), dict(enumerate(choices)), "cancelled"
        self._open += len(choices)
        try:
            while left:
                while not any(choice.stream.has_news for choice in left.values()):
                    news.clear()
                    await news.wait()
                last.clear()
                for index, choice in [*left.items()]:
                    if not choice.stream.has_news:
                        continue
                    piece = choice.take()
                    if piece.finish_reason == "cancelled":
                        raise ApiError(503, "the server stopped before the request was finished", code="stopping")
                    if choice.completion_tokens == len(piece.token_ids):
                        self._metrics.first_token(began)
                    if piece.finish_reason is not None:
                        del left[index]
                        self._metrics.end(piece.finish_reason, began)
                    yield index, piece
                if left:
                    timer = asyncio.get_running_loop().call_later(_PAUSE * self._open, last.set)
                    await last.wait()
                    timer.cancel()
        except EngineError:
            reason = "error"
            raise
        finally:
            self._open -= len(choices)
            for _ in left:
                self._metrics.end(reason, began)


class _Events(EventSourceResponse):
    """A response of events. `_Gate` notices a client that hangs up, so it does not listen for that."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


_NOW = {
    "running": "Requests that take part in the decoding steps.",
    "prefilling": "Requests whose prompt is being run.",
    "waiting": "Requests in the queue.",
    "width": "Rows of the last decoding step.",
    "prefix_bytes": "Memory of the states in the prefix cache, in bytes.",
    "prefix_entries": "States in the prefix cache.",
}
_TOTALS = {
    "rejected": "Requests refused because the queue was full.",
    "prompt_tokens": "Tokens of prompts, those from the prefix cache included.",
    "completion_tokens": "Tokens made for clients.",
    "prefix_hits": "Prompts of which the prefix cache had a part.",
    "prefix_misses": "Prompts of which the prefix cache had nothing.",
    "prefix_tokens": "Prompt tokens that were not run thanks to the prefix cache.",
    "steps": "Decoding steps.",
    "step_seconds": "Time from the start of a decoding step until its tokens were read, summed.",
    "pieces": "Pieces of prompts that were run.",
}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _Metrics(Collector):
    """The numbers of a server for Prometheus: names begin with `deltazoo_`, the label `model` names the model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._status = Status(False, dict.fromkeys((*_NOW, *_TOTALS), 0), {})
        self._registry = registry = CollectorRegistry()
        registry.register(self)

        def histogram(name: str, description: str) -> Histogram:
            found = Histogram(f"deltazoo_{name}", description, ["model"], registry=registry, buckets=_SECONDS)
            return found.labels(model)

        first = "Seconds from a request's arrival to its first token."
        self._time_to_first_token = histogram("time_to_first_token_seconds", first)
        self._request_seconds = histogram("request_seconds", "Seconds from a request's arrival to its end.")
        finished = Counter("deltazoo_finished", "Requests by finish reason.", ["model", "reason"], registry=registry)
        self._finished = {reason: finished.labels(model, reason) for reason in ("stop", "length", "cancelled", "error")}

    def first_token(self, began: float) -> None:
        self._time_to_first_token.observe(time.monotonic() - began)

    def end(self, reason: str, began: float) -> None:
        self._finished[reason].inc()
        self._request_seconds.observe(time.monotonic() - began)

    def text(self, status: Status) -> bytes:
        self._status = status
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for kind, names in ((GaugeMetricFamily, _NOW), (CounterMetricFamily, _TOTALS)):
            for name, description in names.items():
                family = kind(f"deltazoo_{name}", description, labels=["model"])
                family.add_metric([self._model], self._status.counters[name])
                yield family


class _Gate:
    """An application that refuses requests without the key and bodies that are too large, before it reads them.

    The task of an accepted request is cancelled when the client closes its connection.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        if scope["path"] != "/health" and not self._has_key(headers.get("authorization", "")):
            wanted = "the API key is missing or wrong: send the server's as Authorization: Bearer KEY"
            error = ApiError(401, wanted, code="invalid_api_key")
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

        task = asyncio.current_task()
        assert task is not None

        async def cancel_at_hang_up() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            task.cancel()

        watch = asyncio.ensure_future(cancel_at_hang_up())
        try:
            await self._app(scope, replay, send)
        except asyncio.CancelledError:
            if not watch.done():  # the server is ending
                raise
        finally:
            watch.cancel()

    def _has_key(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        return self._key is None or (
            scheme.lower() == "bearer" and secrets.compare_digest(key.strip().encode(), self._key)
        )


class _Connection(H11Protocol):
    """A connection that is closed if a request takes too long to arrive, or to make room for another connection."""

    most = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 100)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._receiving: asyncio.TimerHandle | None = None
        self._heard = self.loop.time()
        self._watch()
        if len(self.connections) > self.most:
            others: Any = self.connections
            idle = [other for other in others if other.cycle is None or other.cycle.response_complete]
            min(idle, key=lambda other: other._heard).transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
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
    """A listening socket, made before the model is loaded, so that a used address is an error at once.

    Args:
        host: a name or an address of this machine.
        port: 0 takes a free one.

    Raises:
        OSError: this machine has no such address, or another program uses it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error
    # Connections inherit the option. asyncio sets it for its own sockets only, and without it the second part of an
    # answer waits up to 40 ms until the client acknowledges the first.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def url_of(address: socket.socket) -> str:
    """The URL of a server at a bound socket."""
    host, port = address.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: ASGIApp, timeout: int) -> uvicorn.Config:
    """uvicorn's settings; `timeout`: seconds within which responses may be sent after the order to stop."""
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
