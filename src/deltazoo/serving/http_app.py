"""The HTTP server as an ASGI application: the endpoints of OpenAI's API in front of an engine."""

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import anyio
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from jinja2 import TemplateError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deltazoo.serving.api_errors import ApiError, add_error_handlers
from deltazoo.serving.api_responses import Answer, ChatAnswer, CompletionAnswer, usage_of
from deltazoo.serving.api_schemas import ChatBody, CompletionBody
from deltazoo.serving.metrics_text import METRICS_TYPE, Metrics
from deltazoo.serving.requests import EngineStopped, Request, Status, Stream
from deltazoo.serving.stream_reading import StreamReader
from deltazoo.serving.text_assembly import TextStream
from deltazoo.serving.token_texts import TokenTexts

__all__ = ["Backend", "RunsRequests", "app_before", "create_app"]


class RunsRequests(Protocol):
    """What the application needs of an engine in its process."""

    tokenizer: Any
    max_queue: int

    def submit_all(self, requests: Sequence[Request]) -> list[Stream]:
        """Take all requests or none; raises QueueFull, RequestError, EngineStopped."""

    def status(self) -> Status:
        """Whether it takes requests, and what it has done."""


class Backend(Protocol):
    """The same of an engine that may be in another process."""

    tokenizer: Any
    max_queue: int

    async def submit_all(self, requests: Sequence[Request]) -> list[Stream]:
        """Take all requests or none; raises QueueFull, RequestError, EngineStopped."""

    async def status(self) -> Status:
        """Whether it takes requests, and what it has done; raises EngineStopped."""


def create_app(engine: RunsRequests, *, model: str, api_key: str | None = None) -> FastAPI:
    """The endpoints `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health` and `/metrics` of an engine.

    Args:
        engine: started and stopped by the caller.
        model: the name under which clients ask for it.
        api_key: required of every request but `/health`, as `Authorization: Bearer KEY`; None: no key.

    Example:
        ```python
        with Engine(model, tokenizer) as engine:
            uvicorn.run(create_app(engine, model="my-model"))
        ```
    """
    return app_before(_InThisProcess(engine), model=model, api_key=api_key)


def app_before(engine: Backend, *, model: str, api_key: str | None) -> FastAPI:
    """`create_app` for an engine wherever it is."""
    endpoints = _Endpoints(engine, model)
    app = FastAPI(title="deltazoo", docs_url=None, redoc_url=None)  # those pages load scripts from elsewhere
    add_error_handlers(app)
    if api_key is not None:
        app.add_middleware(_RequireKey, key=api_key)
    app.post("/v1/completions")(endpoints.completions)
    app.post("/v1/chat/completions")(endpoints.chat_completions)
    app.get("/v1/models")(endpoints.models)
    app.get("/v1/models/{name:path}")(endpoints.model_named)
    app.get("/health")(endpoints.health)
    app.get("/metrics")(endpoints.metrics)
    return app


class _InThisProcess:
    def __init__(self, engine: RunsRequests) -> None:
        self.tokenizer, self.max_queue = engine.tokenizer, engine.max_queue
        self._engine = engine

    async def submit_all(self, requests: Sequence[Request]) -> list[Stream]:
        return self._engine.submit_all(requests)

    async def status(self) -> Status:
        return self._engine.status()


class _Endpoints:
    def __init__(self, engine: Backend, model: str) -> None:
        self.engine, self.tokenizer, self.model = engine, engine.tokenizer, model
        self._texts = TokenTexts(engine.tokenizer)
        self._metrics = Metrics(model)
        self._reader = StreamReader(self._metrics)
        self._created = int(time.time())
        # One text at a time: a tokenizer is not made for several threads, and the event loop must not wait for it.
        self._one_at_a_time = anyio.CapacityLimiter(1)

    async def completions(self, body: CompletionBody, http: HTTPRequest) -> Response:
        """Continue prompts."""
        self._check_model(body.model)
        prompts = [
            await self._in_thread(self._encode, prompt) if isinstance(prompt, str) else prompt for prompt in body.prompt
        ]
        echoes = None
        if body.echo:
            texts = [
                prompt if isinstance(prompt, str) else await self._in_thread(self._decode, prompt)
                for prompt in body.prompt
            ]
            echoes = [text for text in texts for _ in range(body.n)]
        requests = [request for prompt in prompts for request in body.requests(prompt)]
        return await self._answer(http, body, requests, CompletionAnswer(self.model, self._texts, echoes))

    async def chat_completions(self, body: ChatBody, http: HTTPRequest) -> Response:
        """The next message of a chat."""
        self._check_model(body.model)
        prompt = await self._in_thread(self._encode_chat, [message.for_template() for message in body.messages])
        return await self._answer(http, body, body.requests(prompt), ChatAnswer(self.model, self._texts))

    async def models(self) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [self._description()]}

    async def model_named(self, name: str) -> dict[str, Any]:
        """The same, by name."""
        self._check_model(name)
        return self._description()

    async def health(self) -> Response:
        """200 while the engine takes requests, else 503."""
        try:
            running = (await self.engine.status()).running
        except EngineStopped:
            running = False
        return JSONResponse({"status": "ok" if running else "stopped"}, 200 if running else 503)

    async def metrics(self) -> Response:
        """The engine's counters in Prometheus' text format."""
        return PlainTextResponse(self._metrics.text(await self.engine.status()), media_type=METRICS_TYPE)

    def _description(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": self._created, "owned_by": "deltazoo"}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.model):
            raise ApiError(
                404, f"there is no model {name!r} here, only {self.model!r}", param="model", code="model_not_found"
            )

    async def _in_thread(self, function: Callable[..., Any], argument: Any) -> Any:
        return await anyio.to_thread.run_sync(function, argument, limiter=self._one_at_a_time)

    def _encode(self, text: str) -> list[int]:
        _check_text(text, "prompt")
        return self.tokenizer(text)["input_ids"]

    def _decode(self, tokens: list[int]) -> str:
        try:
            return self.tokenizer.decode(tokens)
        except (OverflowError, TypeError, ValueError) as error:
            raise ApiError(
                400, f"prompt has a token that the tokenizer does not know: {error}", param="prompt"
            ) from None

    def _encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ApiError(
                400,
                f"{self.model} has no chat template, so it does not say how messages become a prompt: "
                "use /v1/completions, or save a tokenizer with a chat template beside the model",
                code="no_chat_template",
            )
        for text in (text for message in messages for text in message.values()):
            _check_text(text, "messages")
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except (TemplateError, ValueError) as error:
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error

    async def _answer(
        self, http: HTTPRequest, body: CompletionBody | ChatBody, requests: Sequence[Request], answer: Answer
    ) -> Response:
        """Run the requests of all choices, and respond at once or in pieces."""
        streams = [TextStream(stream, self.tokenizer, body.stop) for stream in await self._submit(requests)]
        if body.stream:
            usage = partial(usage_of, streams, body.n) if body.include_usage else None
            return self._reader.event_stream(streams, answer, usage)
        outputs = await self._reader.whole(streams, http)
        choices = [
            {**answer.choice(index, output), "seed": stream.seed}
            for index, (stream, output) in enumerate(zip(streams, outputs, strict=True))
        ]
        return JSONResponse(answer.whole(choices, usage_of(streams, body.n)))

    async def _submit(self, requests: Sequence[Request]) -> list[Stream]:
        """Streams of all requests, or of none."""
        if len(requests) > self.engine.max_queue:
            raise ApiError(
                400, f"this request makes {len(requests)} choices, and at most {self.engine.max_queue} can wait here"
            )
        return await self.engine.submit_all(requests)


def _check_text(text: str, param: str) -> None:
    """Refuse halves of surrogate pairs, which JSON can hold and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{param} is no text: {error}", param=param) from None


class _RequireKey:
    """Refuses requests without the key, before their body is read; `/health` needs none."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with 401."""
        if scope["type"] != "http" or scope["path"] == "/health" or self._is_authorized(Headers(scope=scope)):
            return await self.app(scope, receive, send)
        error = ApiError(401, "give the server's API key as Authorization: Bearer KEY", code="invalid_api_key")
        await error.response()(scope, receive, send)

    def _is_authorized(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(key.strip().encode(), self.key)
