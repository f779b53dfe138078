"""Requests to the engine, streams of what it makes of them, its counters and errors: token ids, no text."""

import queue
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

__all__ = [
    "MOST_LOGPROBS",
    "EngineError",
    "EngineStopped",
    "FinishReason",
    "Output",
    "Piece",
    "QueueFull",
    "Request",
    "RequestError",
    "Status",
    "Stream",
    "TokenLogprob",
]

MOST_LOGPROBS = 20
"""The most other tokens whose log-probabilities a request may ask for, as in OpenAI's interface."""

FinishReason = Literal["stop", "length", "cancelled"]
"""stop: an end token, or a stop string in the text of the tokens. length: `max_tokens` or the context limit. cancelled:
by the client or a stop of the engine."""


class RequestError(ValueError):
    """A request that cannot be served; `param`: the field that is wrong."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFull(RuntimeError):
    """Too many requests wait; `retry_after`: seconds after which the queue may be shorter."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(waiting, retry_after)
        self.waiting, self.retry_after = waiting, retry_after

    def __str__(self) -> str:
        return f"{self.waiting} requests are waiting: try again in {self.retry_after} seconds"


class EngineStopped(RuntimeError):
    """The engine takes no requests: it has not been started, it stops, or it has failed."""


class EngineError(RuntimeError):
    """The model failed on a request, or its tokens have no text, or the engine is lost; `__cause__`: why, if known.

    A model fails, too, where it computes NaN or infinite logits; other requests go on."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and how to continue it.

    Attributes:
        prompt: token numbers, at least one.
        max_tokens: the most to generate; None: until an end token or the engine's context limit.
        temperature: divides the logits; 0 takes the likeliest token, and the filters then have no effect.
        top_k: draw among this many of the likeliest tokens; None: among all.
        top_p: draw among the fewest tokens, likeliest first, whose probabilities add up to this.
        seed: of the draws: the same seed, prompt and parameters give the same tokens. None: one is drawn.
        ignore_eos: whether to go on after end tokens.
        logprobs: report the log-probability of every new token, and of this many of the likeliest; None: report none.

    Raises:
        RequestError: a value out of its range.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        most, k, seed, logprobs = self.max_tokens, self.top_k, self.seed, self.logprobs
        for is_right, message in (
            (bool(self.prompt), "the prompt must have at least one token"),
            (most is None or most >= 1, f"max_tokens must be at least 1, got {most}"),
            (0 <= self.temperature <= 1e30, f"temperature must be between 0 and 1e30, got {self.temperature}"),
            (k is None or 1 <= k < 2**63, f"top_k must be at least 1 and fit 64 bits, got {k}"),
            (0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p}"),
            (seed is None or -(2**63) <= seed < 2**63, f"seed must be an integer of 64 bits, got {seed}"),
            (
                logprobs is None or 0 <= logprobs <= MOST_LOGPROBS,
                f"logprobs must be between 0 and {MOST_LOGPROBS}, got {logprobs}",
            ),
        ):
            if not is_right:
                raise RequestError(message)

    def with_seed(self) -> "Request":
        """The same with a seed, if it has none."""
        # Of numbers with more than 53 bits many readers of JSON lose digits, and could not ask for the seed again.
        return self if self.seed is not None else replace(self, seed=random.getrandbits(53))


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """The log-probability of one new token, before temperature and filters.

    Attributes:
        token_id: of the token.
        logprob: of the token.
        top: the likeliest tokens at this position and their log-probabilities, likeliest first.
        content: from a `TextStream`, bytes of the text that come from the token; None: a special token, without text.
        offset: characters of the text before the token; before its character, if that has several tokens.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    content: bytes | None = None
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a request's output.

    Attributes:
        token_ids: new tokens, an end token included.
        logprobs: one per new token, if the request asked for them.
        finish_reason: set in the last piece.
        cached_tokens: in the first piece, tokens of the prompt that were not run, since the prefix cache had their
            state.
        text: of the tokens, from a `TextStream`; empty otherwise. Characters whose bytes are not all there, and the
            possible beginning of a stop string, come with a later piece.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    text: str = ""

    @staticmethod
    def joined(parts: "Sequence[int | Piece]") -> "Piece":
        """At least one part, a token or a piece, one behind the other, as one piece."""
        pieces = [part for part in parts if isinstance(part, Piece)]
        if len(pieces) == len(parts) == 1:
            return pieces[0]
        logprobs = tuple(entry for piece in pieces for entry in piece.logprobs or ())
        return Piece(
            token_ids=tuple(x for part in parts for x in ((part,) if isinstance(part, int) else part.token_ids)),
            logprobs=None if all(piece.logprobs is None for piece in pieces) else logprobs,
            finish_reason=None if isinstance(parts[-1], int) else parts[-1].finish_reason,
            cached_tokens=sum(piece.cached_tokens for piece in pieces),
            text="".join(piece.text for piece in pieces),
        )


Output = int | Piece | EngineError
"""A part of a request's output as the engine makes it: a token and nothing else, a piece, or an error that ends it."""


class Stream:
    """The output of one request: an iterator over its pieces, which blocks until one has come.

    Tokens that a reader has not taken become one piece, so a slow reader gets fewer and larger ones. The last has a
    `finish_reason`. One thread reads; `cancel` may be called from anywhere.

    Args:
        request: whose output it is, with a seed.
        on_cancel: called by `cancel`.
        notify: called with each output that has come.

    Attributes:
        cached_tokens: tokens of the prompt that were not run, since the prefix cache had their state; known with the
            first piece.
        completion_tokens: new tokens read so far, an end token included.

    Raises:
        EngineError: on reading, if the model failed on the request, or the engine is lost.
    """

    def __init__(
        self, request: Request, on_cancel: Callable[[], None], notify: Callable[[Output], None] | None = None
    ) -> None:
        self.request = request
        self.cached_tokens = self.completion_tokens = 0
        self._on_cancel, self._notify = on_cancel, notify
        self._outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._has_ended = False
        """Whether the reader has had the last piece or an error."""

    def cancel(self) -> None:
        """End the request; its row of the batch is free at the next step. After its end nothing happens."""
        if not self._has_ended:
            self._on_cancel()

    def __iter__(self) -> Iterator[Piece]:
        while not self._has_ended:
            yield self.take()

    @property
    def has_news(self) -> bool:
        """Whether `take` would not block."""
        return not self._outputs.empty()

    def take(self) -> Piece:
        """The next piece: all tokens that have come; without any, raises the error that has."""
        made: list[int | Piece] = []
        while not made or self.has_news:
            output = self._outputs.get()
            if isinstance(output, EngineError):
                if made:
                    self._outputs.put(output)  # it is the last one
                    break
                self._has_ended = True
                raise output
            made.append(output)
        piece = Piece.joined(made)
        self._has_ended = piece.finish_reason is not None
        self.completion_tokens += len(piece.token_ids)
        self.cached_tokens += piece.cached_tokens
        return piece

    def put(self, output: Output) -> None:
        """Add what the engine has made."""
        self._outputs.put(output)
        if self._notify is not None:
            self._notify(output)

    @staticmethod
    def put_all(outputs: "Iterable[tuple[Stream, Output]]") -> None:
        """Add to several streams what the engine has made."""
        for stream, output in outputs:
            stream.put(output)


def is_last(output: Any) -> bool:
    """Whether an output, or another message, is the last of its request."""
    return not isinstance(output, int) and (not isinstance(output, Piece) or output.finish_reason is not None)


@dataclass(frozen=True)
class Status:
    """Numbers of an engine.

    Attributes:
        running: whether it takes requests.
        counters: `running`, `waiting`, `steps` and so on: the numbers of docs/generation.md, by name.
        finished: ended requests by finish reason; "error" for those that the model failed on. The engine knows no
            text, so a request that a stop string ended is among the cancelled ones.
    """

    running: bool
    counters: Mapping[str, float]
    finished: Mapping[str, int]
