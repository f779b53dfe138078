"""OpenAI's API: errors, bodies of requests, the `Request` made of a body, answers, and chunks of streamed answers.

A null field counts as left out. A field of OpenAI's API that this server does not compute is accepted with values that
request nothing (`tools: []`), and refused by name with any other. An unknown field is refused, as in OpenAI's API.
"""

import json
import math
import reprlib
import time
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import to_json
from starlette.responses import JSONResponse

from deltazoo import __version__
from deltazoo.serving.requests import EngineError, EngineStopped, Piece, QueueFull, Request, RequestError
from deltazoo.serving.text import TextStream, bytes_of, text_of

MOST_CHOICES = 128
"""Most choices of one request, all prompts together."""


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
        param: the field of the request that is wrong.
        code: a name for programs, that of OpenAI where it has one.
        retry_after: seconds after which the client should try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @staticmethod
    def of(error: Exception) -> "ApiError":
        """The error for the client that describes an error of the engine or the program."""
        match error:
            case ApiError():
                return error
            case QueueFull():
                return ApiError(429, str(error), code="queue_full", retry_after=error.retry_after)
            case RequestError():
                return ApiError(400, str(error), param=error.param)
            case EngineStopped():
                return ApiError(503, f"the server takes no new requests: {error}", code="stopping", retry_after=1)
            case EngineError():
                return ApiError(500, f"the engine failed on this request: {error}")
        return ApiError(500, f"unexpected {type(error).__name__}; the server's log has the traceback")

    def response(self) -> JSONResponse:
        """The error as a whole response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def _body_error(error: Any) -> ApiError:
    """The error for the first fault of a body, with a sentence that names the field."""
    path = [f"[{piece}]" if isinstance(piece, int) else f".{piece}" for piece in error["loc"]]
    param = "".join(path).removeprefix(".")
    if error["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: there is no such field", param=param, code="unknown_parameter")
    message = error["msg"].removeprefix("Value error, ")
    message = f"{param}: {message[:1].lower()}{message[1:]}, got {_shortened(error['input'])}"
    return ApiError(400, message, param=param)


def _shortened(value: Any) -> str:
    """A value in Python's notation, cut if it is long."""
    text = reprlib.repr(value)  # it does not read all of a long value
    return text if len(text) <= 60 else text[:57] + "..."


_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "store": (False,),
}


def _refuse(wrong: bool, param: str, message: str) -> None:
    if wrong:
        raise ApiError(400, message, param=param)


def _prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a value: a text, several texts, token ids, or several lists of token ids."""

    def is_ids(prompt: Any) -> bool:
        return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)

    if isinstance(value, str) or is_ids(value):
        return [value]
    several = isinstance(value, list) and bool(value)
    if several and (all(isinstance(prompt, str) for prompt in value) or all(is_ids(prompt) for prompt in value)):
        return value
    raise ValueError("must be a text, a list of texts, or one or more lists of token ids, none of them empty")


def _content(value: Any) -> str:
    texts = []
    for part in value if isinstance(value, list) else [{"type": "text", "text": value}]:
        match part:
            case {"type": "text", "text": str(text), **others} if not others:
                texts.append(text)
            case _:
                raise ValueError("must be a text or a list of parts of the type text, as this server reads no others")
    return "".join(texts)


def _stop_strings(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a text or a list of up to four, none of them empty")
    return stops


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """The field `stream_options`."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Body(_Strict):
    """The fields of both endpoints; `top_k` and `ignore_eos` are not in OpenAI's API."""

    asks_for_nothing: ClassVar[dict[str, tuple[Any, ...]]]
    without_effect: ClassVar[tuple[str, ...]] = ("user",)

    model: str | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1, lt=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], PlainValidator(_stop_strings)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    @classmethod
    def of(cls, content: bytes, headers: Mapping[str, str]) -> Self:
        """The body of a request with this content; ApiError for a bad one."""
        try:
            fields = json.loads(content) if "json" in headers.get("content-type", "").lower() else None
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ApiError(400, "the body must be a JSON object, sent with the header Content-Type: application/json")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _body_error(error.errors(include_url=False)[0]) from None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_computed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in fields.items() if value is not None and name not in cls.without_effect}
        for name, accepted in cls.asks_for_nothing.items():
            if name in given and (value := given.pop(name)) not in accepted:
                raise ApiError(
                    400,
                    f"{name} is not computed by this server: leave it out, got {_shortened(value)}",
                    param=name,
                    code="unsupported_parameter",
                )
        for name in given:  # pydantic would list all unknown fields
            if name not in cls.model_fields:
                param = _shortened(name)[1:-1]
                raise ApiError(400, f"{param}: there is no such field", param=param, code="unknown_parameter")
        return given

    @model_validator(mode="after")
    def _check(self) -> "_Body":
        wrong = self.stream_options is not None and not self.stream
        _refuse(wrong, "stream_options", "stream_options acts on stream=true only")
        return self

    @abstractmethod
    def limits(self) -> dict[str, Any]:
        """`max_tokens` and `logprobs` of the requests."""

    def requests(self, prompt: list[int]) -> list[Request]:
        """The requests of a prompt, one per choice; with a seed, choice i draws with `seed + i`."""
        # With temperature 0 filters keep the likeliest token, so they change nothing.
        filters = {} if self.temperature == 0 else {"top_p": self.top_p, "top_k": self.top_k}
        options = {"temperature": self.temperature, "ignore_eos": self.ignore_eos, **filters, **self.limits()}
        request = Request(prompt=tuple(prompt), **options)
        return [replace(request, seed=None if self.seed is None else self.seed + i) for i in range(self.n)]


class CompletionBody(_Body):
    """The body of `/v1/completions`."""

    asks_for_nothing: ClassVar[dict[str, tuple[Any, ...]]] = {**_ASKS_FOR_NOTHING, "suffix": ("",)}

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    max_tokens: int = Field(16, ge=1)
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionBody":
        _refuse(self.best_of not in (None, self.n), "best_of", f"best_of must equal n={self.n}, got {self.best_of}")
        _refuse(
            self.echo and self.logprobs is not None,
            "echo",
            "logprobs of the prompt are not computed: give echo or logprobs, not both",
        )
        _refuse(
            len(self.prompt) * self.n > MOST_CHOICES,
            "prompt",
            f"one request makes at most {MOST_CHOICES} choices, got {len(self.prompt)} prompts times n={self.n}",
        )
        return self

    def limits(self) -> dict[str, Any]:
        """`max_tokens` and `logprobs` of the requests, as in the body."""
        return {"max_tokens": self.max_tokens, "logprobs": self.logprobs}


class Message(_Strict):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_content)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_is_empty(cls, fields: Any) -> Any:
        """Drop empty fields: clients send an answer back with all of them, `tool_calls: []` among them."""
        if not isinstance(fields, dict):
            return fields
        fields = {name: value for name, value in fields.items() if value is not None and value != []}
        if "tool_calls" in fields or "function_call" in fields or fields.get("role") in ("tool", "function"):
            raise ValueError("this server makes no tool calls, and reads no messages with them or their results")
        return fields

    def for_template(self) -> dict[str, str]:
        """The fields that chat templates read; a developer's message becomes the system's."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class ChatBody(_Body):
    """The body of `/v1/chat/completions`; `chat_template_kwargs` is not in OpenAI's API."""

    asks_for_nothing: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_ASKS_FOR_NOTHING,
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }
    without_effect: ClassVar[tuple[str, ...]] = (
        *("user", "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier"),
    )

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatBody":
        wrong = self.top_logprobs is not None and not self.logprobs
        _refuse(wrong, "top_logprobs", "top_logprobs acts on logprobs=true only")
        _refuse(
            self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens),
            "max_tokens",
            f"max_tokens is the older name of max_completion_tokens: give one, got {self.max_tokens} and "
            f"{self.max_completion_tokens}",
        )
        return self

    def limits(self) -> dict[str, Any]:
        """`max_tokens` and `logprobs` of the requests; the body may have either name of `max_tokens`."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {"max_tokens": most, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}


class Answer:
    """A response as JSON, whole or in chunks.

    Args:
        model: the name under which the model is served.
        tokenizer: tokenizer for log-probabilities.
        choices: streams of all choices, those of a prompt side by side.
        echoes: the prompt of each choice of a completion, if the text begins with it.
    """

    def __init__(
        self, body: "_Body", model: str, tokenizer: Any, choices: Sequence[TextStream], echoes: Sequence[str] | None
    ) -> None:
        self.choices = choices
        self._body, self._tokenizer = body, tokenizer
        self._begins = dict(enumerate(echoes or [""] * len(choices)))  # the prompts of choices that have not begun
        self._frames: dict[int, list[bytes]] = {}
        """What stands before and after the text of an event, by choice."""
        self._is_chat = isinstance(body, ChatBody)
        self._common = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"deltazoo-{__version__}",
        }

    def whole(self, outputs: Sequence[Piece]) -> bytes:
        """A response that is not streamed, with the output of each choice."""
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        if self._is_chat:
            for choice in choices:
                choice["message"] = {"content": "", "refusal": None, **choice.pop("delta")}
        return self._json("chat.completion", choices, usage=self._usage())

    def event(self, index: int, piece: Piece) -> bytes:
        """The event of a piece of a choice."""
        is_text = piece.text and piece.logprobs is None and piece.finish_reason is None
        if not is_text or index in self._begins:
            return event_of(self._json("chat.completion.chunk", [self._choice(index, piece)]))
        if index not in self._frames:  # events with text alone differ in the text; a frame takes a seventh of the time
            mark = f"text of {self._common['id']}"
            frame = event_of(self._json("chat.completion.chunk", [self._choice(index, Piece(text=mark))]))
            self._frames[index] = frame.split(to_json(mark))
        return to_json(piece.text).join(self._frames[index])

    def last_event(self) -> bytes:
        """The event with the numbers of tokens; empty unless they were asked for."""
        options = self._body.stream_options
        if not options or not options.include_usage:
            return b""
        return event_of(self._json("chat.completion.chunk", [], usage=self._usage()))

    def _json(self, kind_of_chat: str, choices: Sequence[dict[str, Any]], **usage: Any) -> bytes:
        kind = kind_of_chat if self._is_chat else "text_completion"
        return to_json({**self._common, "object": kind, "choices": choices, **usage})

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """An entry of the response: new text, its log-probabilities, and at the end the reason and the seed."""
        logprobs: Any = piece.logprobs
        if logprobs is not None:
            logprobs = self._logprobs_of_chat(logprobs) if self._is_chat else self._logprobs(logprobs)
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        begins = self._begins.pop(index, None)
        if self._is_chat:
            delta = {} if begins is None else {"role": "assistant"}
            choice["delta"] = {**delta, "content": piece.text} if piece.text else delta
        else:
            choice["text"] = (begins or "") + piece.text
        return choice if piece.finish_reason is None else {**choice, "seed": self.choices[index].stream.request.seed}

    def _logprobs(self, entries: Sequence[Any]) -> dict[str, Any]:
        """Lists with an entry per token. Of several likely tokens with one text, the likeliest stands in the list."""
        tokens = [self._token(entry.token_id, entry.logprob, entry.content)["token"] for entry in entries]
        tops = []
        for token, entry in zip(tokens, entries, strict=True):
            others = [self._token(other, value) for other, value in entry.top[::-1]]
            tops.append({**{other["token"]: other["logprob"] for other in others}, token: _number(entry.logprob)})
        return {
            "tokens": tokens,
            "token_logprobs": [_number(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": [entry.offset for entry in entries],
        }

    def _logprobs_of_chat(self, entries: Sequence[Any]) -> dict[str, Any]:
        content = [
            {
                **self._token(entry.token_id, entry.logprob, entry.content),
                "top_logprobs": [self._token(token, value) for token, value in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float, content: bytes | None = None) -> dict[str, Any]:
        content = bytes_of(self._tokenizer, token) if content is None else content
        text = text_of(self._tokenizer, token, content)
        return {"token": text, "logprob": _number(logprob), "bytes": None if content is None else [*content]}

    def _usage(self) -> dict[str, Any]:
        """The numbers of tokens; a prompt counts once."""
        prompts = [choice.stream for choice in self.choices[:: self._body.n]]
        prompt_tokens = sum(len(stream.request.prompt) for stream in prompts)
        completion_tokens = sum(choice.completion_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(stream.cached_tokens for stream in prompts)},
        }


def _number(logprob: float) -> float:
    """A log-probability for JSON, which has no infinity: at least -9999, as in OpenAI's API. NaN raises EngineError."""
    if math.isnan(logprob):
        raise EngineError("the model computed NaN as a log-probability")
    return max(logprob, -9999.0)


def event_of(data: bytes) -> bytes:
    """The event of data on one line, such as JSON. Separators of lines in Unicode do not end it."""
    return b"data: " + data + b"\n\n"
