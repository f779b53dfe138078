"""Bodies of requests to the HTTP server: OpenAI's fields, what is computed of them, and the `Request` they become.

A field given as null is a field left out. A field that OpenAI's API has and this server does not compute is accepted
with the values that ask for nothing (`tools: []`), and refused by name with any other. A field that nobody knows is
refused, as OpenAI's API does.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from deltazoo.serving.api_errors import ApiError, shortened
from deltazoo.serving.requests import Request

__all__ = ["ChatBody", "CompletionBody", "Message"]

MOST_CHOICES = 128
"""Choices of one request, all prompts together."""

_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "store": (False,),
}


class _Body(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="forbid", strict=True)
    asks_for_nothing: ClassVar[dict[str, tuple[Any, ...]]]
    without_effect: ClassVar[tuple[str, ...]] = ("user",)

    model: str | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(
        None, ge=1, lt=2**31, description="Not in OpenAI's API: draw from this many of the likeliest."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], PlainValidator(lambda value: _stop_strings(value), json_schema_input_type=Any)] = []
    ignore_eos: bool = Field(False, description="Not in OpenAI's API: go on after an end token.")
    stream: bool = False
    stream_options: "StreamOptions | None" = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_computed(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        given = {name: value for name, value in fields.items() if value is not None and name not in cls.without_effect}
        for name, accepted in cls.asks_for_nothing.items():
            if name in given and (value := given.pop(name)) not in accepted:
                raise ApiError(
                    400,
                    f"{name} is not computed by this server: leave it out, got {shortened(value)}",
                    param=name,
                    code="unsupported_parameter",
                )
        return given

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "_Body":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options acts on stream=true only", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def requests_of(self, prompt: list[int], **limits: Any) -> list[Request]:
        """One request per choice for a prompt; with a seed, choice i draws with `seed + i`."""
        if self.temperature == 0:  # filters keep the likeliest token, so they change nothing
            sampling: dict[str, Any] = {"temperature": 0.0}
        else:
            sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return [
            Request(
                prompt=tuple(prompt),
                seed=None if self.seed is None else self.seed + choice,
                ignore_eos=self.ignore_eos,
                **sampling,
                **limits,
            )
            for choice in range(self.n)
        ]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class CompletionBody(_Body):
    """Body of `/v1/completions`."""

    asks_for_nothing: ClassVar[dict[str, tuple[Any, ...]]] = {**_ASKS_FOR_NOTHING, "suffix": ("",)}

    prompt: Annotated[list[str | list[int]], PlainValidator(lambda value: _prompts(value), json_schema_input_type=Any)]
    max_tokens: int = Field(16, ge=1)
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _check(self) -> "CompletionBody":
        if self.best_of not in (None, self.n):
            raise ApiError(400, f"best_of must equal n={self.n}, got {self.best_of}", param="best_of")
        if self.echo and self.logprobs is not None:
            raise ApiError(
                400, "logprobs of the prompt are not computed: give echo or logprobs, not both", param="echo"
            )
        if len(self.prompt) * self.n > MOST_CHOICES:
            raise ApiError(
                400,
                f"one request makes at most {MOST_CHOICES} choices, got {len(self.prompt)} prompts times n={self.n}",
                param="prompt",
            )
        return self

    def requests(self, prompt: list[int]) -> list[Request]:
        """One per choice."""
        return self.requests_of(prompt, max_tokens=self.max_tokens, logprobs=self.logprobs)


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_is_empty(cls, fields: Any) -> Any:
        """Clients send an answer back with all its empty fields, `tool_calls: []` among them."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None and value != []}

    def for_template(self) -> dict[str, str]:
        """As chat templates read it: text content, and a developer's message as the system's."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatBody(_Body):
    """Body of `/v1/chat/completions`."""

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

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1, description="The older name of max_completion_tokens.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _check(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs acts on logprobs=true only", param="top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ApiError(
                400,
                f"max_tokens is the older name of max_completion_tokens: give one, got {self.max_tokens} and "
                f"{self.max_completion_tokens}",
                param="max_tokens",
            )
        return self

    def requests(self, prompt: list[int]) -> list[Request]:
        """One per choice."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.requests_of(prompt, max_tokens=most, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


def _prompts(value: Any) -> list[str | list[int]]:
    """A text, several texts, token ids, or several lists of token ids; as a list of prompts."""

    def is_ids(prompt: Any) -> bool:
        return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)

    if isinstance(value, str) or is_ids(value):
        return [value]
    several = isinstance(value, list) and bool(value)
    if several and (all(isinstance(prompt, str) for prompt in value) or all(is_ids(prompt) for prompt in value)):
        return value
    raise ValueError("must be a text, a list of texts, or one or more lists of token ids, none of them empty")


def _stop_strings(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a text or a list of up to four, none of them empty")
    return stops
