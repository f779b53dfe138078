"""Requests to the engine, streams of what it makes of them, its counters and errors: token ids, no text."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

__all__ = [
    "MOST_LOGPROBS",
    "Counters",
    "EngineError",
    "EngineStopped",
    "FinishReason",
    "Histogram",
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
    """A request that cannot be served.

    Args:
        message: a sentence for the client.
        param: the field of the request that is wrong.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFull(RuntimeError):
    """Too many requests wait.

    Args:
        waiting: requests.
        retry_after: seconds after which the queue may be shorter.
    """

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

    Raises:
        RequestError: a value out of its range.
    """

    prompt: tuple[int, ...]
    """Token numbers, at least one."""
    max_tokens: int | None = None
    """The most to generate; None: until an end token or the engine's context limit."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token, and the filters below then have no effect."""
    top_k: int | None = None
    """Draw among this many of the likeliest tokens; None: among all."""
    top_p: float = 1.0
    """Draw among the fewest tokens, likeliest first, whose probabilities add up to this."""
    seed: int | None = None
    """Of the draws: the same seed, prompt and parameters give the same tokens. None: one is drawn."""
    ignore_eos: bool = False
    """Whether to go on after end tokens."""
    logprobs: int | None = None
    """Report the log-probability of every new token, and of this many of the likeliest; None: report none."""

    def __post_init__(self) -> None:
        _check(bool(self.prompt), "the prompt must have at least one token")
        _check(self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}")
        _check(0 <= self.temperature <= 1e30, f"temperature must be between 0 and 1e30, got {self.temperature}")
        _check(
            self.top_k is None or 1 <= self.top_k < 2**63, f"top_k must be at least 1 and fit 64 bits, got {self.top_k}"
        )
        _check(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p}")
        _check(
            self.seed is None or -(2**63) <= self.seed < 2**63, f"seed must be an integer of 64 bits, got {self.seed}"
        )
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS,
            f"logprobs must be between 0 and {MOST_LOGPROBS}, got {self.logprobs}",
        )

    def with_seed(self) -> "Request":
        """The same with a seed, if it has none."""
        # Of numbers with more than 53 bits many readers of JSON lose digits, and could not ask for the seed again.
        return self if self.seed is not None else replace(self, seed=random.getrandbits(53))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """The log-probability of one new token, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens at this position and their log-probabilities, likeliest first."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a request's output."""

    token_ids: tuple[int, ...] = ()
    """New tokens, an end token included."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One per new token, if the request asked for them."""
    finish_reason: FinishReason | None = None
    """Set in the last piece."""
    cached_tokens: int = 0
    """In the first piece: tokens of the prompt that were not run, since the prefix cache had their state."""
    text: str = ""
    """Text of the tokens, from a `TextStream`; empty otherwise. Characters whose bytes are not all there, and what may
    become a stop string, come with a later piece."""

    @staticmethod
    def joined(parts: "Sequence[int | Piece]") -> "Piece":
        """At least one part, a token or a piece, one behind the other, as one piece."""
        pieces = [part if isinstance(part, Piece) else Piece(token_ids=(part,)) for part in parts]
        if len(pieces) == 1:
            return pieces[0]
        logprobs = tuple(entry for piece in pieces for entry in piece.logprobs or ())
        return Piece(
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            logprobs=None if all(piece.logprobs is None for piece in pieces) else logprobs,
            finish_reason=pieces[-1].finish_reason,
            cached_tokens=sum(piece.cached_tokens for piece in pieces),
            text="".join(piece.text for piece in pieces),
        )


Output = int | Piece | EngineError
"""A part of a request's output as the engine makes it: a token and nothing else, a piece, or an error that ends it."""


class Stream:
    """The output of one request: an iterator over its pieces, for threads (`for`) or coroutines (`async for`).

    Tokens that a reader has not taken become one piece, so a slow reader gets fewer and larger ones. The last has a
    `finish_reason`. One thread or coroutine reads; `cancel` may be called from anywhere.

    Args:
        request: whose output it is, with a seed.
        on_cancel: called with the stream by `cancel`.

    Attributes:
        seed: of the draws.
        prompt_tokens: of the request.
        cached_tokens: tokens of the prompt that were not run, since the prefix cache had their state; known with the
            first piece.
        completion_tokens: new tokens read so far, an end token included.

    Raises:
        EngineError: on reading, if the model failed on the request, or the engine is lost.
    """

    def __init__(self, request: Request, on_cancel: Callable[["Stream"], None]) -> None:
        self.request = request
        self.seed = request.seed
        self.prompt_tokens = len(request.prompt)
        self.cached_tokens = self.completion_tokens = 0
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._outputs: list[Output] = []
        self._is_read = False
        """Whether the reader has had the last piece or an error."""
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def cancel(self) -> None:
        """End the request; its row of the batch is free at the next step. After its end nothing happens."""
        if not self._is_read:
            self._on_cancel(self)

    def __iter__(self) -> Iterator[Piece]:
        """The pieces as they are made; blocks."""
        while not self._is_read:
            with self._changed:
                self._changed.wait_for(lambda: self._outputs)
            yield self._take()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces as they are made."""
        news = asyncio.Event()
        with self._changed:
            self._reader = asyncio.get_running_loop(), news
        while not self._is_read:
            news.clear()
            if self._outputs:
                yield self._take()
            else:
                await news.wait()

    def _take(self) -> Piece:
        """All that has come, of which an error is left for the next call if it is not alone."""
        with self._changed:
            outputs, self._outputs = self._outputs, []
            made = [output for output in outputs if not isinstance(output, EngineError)]
            if len(made) < len(outputs) > 1:
                self._outputs = outputs[-1:]
        if not made:
            self._is_read = True
            raise outputs[0]  # type: ignore[misc]
        piece = Piece.joined(made)
        self._is_read = piece.finish_reason is not None
        self.completion_tokens += len(piece.token_ids)
        self.cached_tokens += piece.cached_tokens
        return piece

    @staticmethod
    def deliver(outputs: "Iterable[tuple[Stream, Output]]") -> None:
        """Add outputs to their streams, and tell the readers: one message per event loop, however many streams."""
        arrived: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for stream, output in outputs:
            with stream._changed:
                stream._outputs.append(output)
                stream._changed.notify()
                if stream._reader is not None and not stream._reader[1].is_set():
                    loop, news = stream._reader
                    arrived.setdefault(loop, []).append(news)
        for loop, events in arrived.items():
            with suppress(RuntimeError):  # the loop is closed, so nobody reads
                loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()


@dataclass(frozen=True)
class Histogram:
    """Counts of values per range, as Prometheus has them."""

    bounds: tuple[float, ...]
    """Upper bounds of the ranges, ascending; values above the last are counted in `count` alone."""
    counts: tuple[int, ...] = ()
    """Values at most as large as each bound: each count includes those before it."""
    total: float = 0.0
    """Sum of all values."""
    count: int = 0
    """Number of values."""

    def with_value(self, value: float) -> "Histogram":
        """The same with one more value."""
        before = self.counts or (0,) * len(self.bounds)
        counts = tuple(count + (value <= bound) for count, bound in zip(before, self.bounds, strict=True))
        return replace(self, counts=counts, total=self.total + value, count=self.count + 1)


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds of histograms of times."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What the engine has done since its start, and does now."""

    running: int = 0
    """Requests that take part in the steps."""
    prefilling: int = 0
    """Requests whose prompt is being run."""
    waiting: int = 0
    """Requests in the queue."""
    width: int = 0
    """Rows of the last step."""
    finished: Mapping[str, int] = field(default_factory=dict)
    """Requests by finish reason; "error" for those that the model failed on."""
    rejected: int = 0
    """Requests refused because the queue was full."""
    prompt_tokens: int = 0
    """Tokens of all prompts, those from the prefix cache included."""
    completion_tokens: int = 0
    """Tokens made for clients."""
    prefix_hits: int = 0
    """Prompts of which the prefix cache had a part."""
    prefix_misses: int = 0
    """Prompts of which it had nothing."""
    prefix_tokens: int = 0
    """Prompt tokens that were not run thanks to it."""
    prefix_bytes: int = 0
    """Memory of the states in it."""
    prefix_entries: int = 0
    """States in it."""
    steps: int = 0
    """Decoding steps."""
    step_seconds: float = 0.0
    """Time from the start of a step until its tokens were read, summed; on a GPU two steps may overlap."""
    pieces: int = 0
    """Pieces of prompts that were run."""
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """Seconds from `submit` to the first token."""
    request_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """Seconds from `submit` to the end."""


@dataclass(frozen=True)
class Status:
    """Whether an engine takes requests, and what it has done."""

    running: bool
    counters: Counters
