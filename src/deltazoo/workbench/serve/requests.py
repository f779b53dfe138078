"""What a server and the engine say to each other: requests, streams of their output, counters, errors."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from deltazoo.workbench.serve.text_assembly import TextAssembly

__all__ = [
    "MOST_LOGPROBS",
    "Counters",
    "EngineError",
    "EngineStopped",
    "FinishReason",
    "Histogram",
    "Piece",
    "QueueFull",
    "Request",
    "RequestError",
    "Stream",
    "TokenLogprob",
]

_log = logging.getLogger(__name__)

MOST_LOGPROBS = 20
"""The most other tokens whose log-probabilities a request may ask for, as in OpenAI's interface."""

_MOST_PIECES = 256
"""Pieces that a stream keeps for a reader who does not come, before they become one, which takes less memory."""

FinishReason = Literal["stop", "length", "cancelled"]
"""stop: an end token or a stop string. length: `max_tokens` or the context limit. cancelled: by the client or a stop of
the engine."""


class RequestError(ValueError):
    """A request that cannot be served; the message is a sentence for the client."""


class QueueFull(RuntimeError):
    """Too many requests wait.

    Args:
        waiting: requests.
        retry_after: seconds after which the queue may be shorter.
    """

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests are waiting: try again in {retry_after} seconds")
        self.retry_after = retry_after


class EngineStopped(RuntimeError):
    """The engine takes no requests: it has not been started, it stops, or it has failed."""


class EngineError(RuntimeError):
    """The model, or the tokenizer, failed on a request; `__cause__` is the exception."""


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
    """Of the draws: the same seed, prompt and parameters give the same tokens. None: the engine chooses one."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation. They are not part of the output."""
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
        _check(all(self.stop), "a stop string must not be empty")
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS,
            f"logprobs must be between 0 and {MOST_LOGPROBS}, got {self.logprobs}",
        )


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

    text: str = ""
    """What the tokens so far add to the text. Characters whose bytes are not all there, and what may become a stop
    string, come with a later piece."""
    token_ids: tuple[int, ...] = ()
    """New tokens, an end token included."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One per new token, if the request asked for them."""
    finish_reason: FinishReason | None = None
    """Set in the last piece."""

    @staticmethod
    def joined(pieces: "Sequence[Piece]") -> "Piece":
        """At least one piece, one behind the other, as one."""
        if len(pieces) == 1:
            return pieces[0]
        logprobs = tuple(entry for piece in pieces for entry in piece.logprobs or ())
        return Piece(
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            logprobs=None if all(piece.logprobs is None for piece in pieces) else logprobs,
            finish_reason=pieces[-1].finish_reason,
        )


class Stream:
    """The output of one request: an iterator over its pieces, for threads (`for`) or coroutines (`async for`).

    Pieces that a reader has not taken become one, so a slow reader gets fewer and larger ones. The last has a
    `finish_reason`. One thread or coroutine reads; `cancel` may be called from anywhere.

    Args:
        request: whose output it is.
        seed: of the draws.
        on_cancel: called by the first `cancel`.
        text: makes the text of the tokens where they are read, so that the engine does not wait for it; None: pieces
            come with their text.

    Attributes:
        prompt_tokens: of the request.
        cached_tokens: tokens of the prompt that were not run, since the prefix cache had their state; known with the
            first piece.
        completion_tokens: new tokens so far, an end token included.

    Raises:
        EngineError: on reading, if the model or the tokenizer failed on the request.
    """

    def __init__(
        self,
        request: Request,
        seed: int,
        on_cancel: Callable[["Stream"], None],
        text: TextAssembly | None = None,
    ) -> None:
        self.request = request
        self.seed = seed
        self.prompt_tokens = len(request.prompt)
        self.cached_tokens = 0
        self.completion_tokens = 0
        self._on_cancel = on_cancel
        self._text = text
        self._cancelled = False
        self._changed = threading.Condition()
        self._pieces: list[Piece] = []
        self._error: BaseException | None = None
        self._ended = False
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def cancel(self) -> None:
        """End the request; its row of the batch is free at the next step. After its end nothing happens."""
        with self._changed:
            first = not (self._cancelled or self._ended)
            self._cancelled = True
        if first:
            self._on_cancel(self)

    def __iter__(self) -> Iterator[Piece]:
        """The pieces as they are made; blocks."""
        more = True
        while more:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._ended)
            piece, more = self._take()
            if piece is not None:
                yield piece

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The same in a coroutine."""
        news, more = asyncio.Event(), True
        with self._changed:
            self._reader = asyncio.get_running_loop(), news
        while more:
            news.clear()
            piece, more = self._take()
            if piece is not None:
                yield piece
            elif more:
                await news.wait()

    def _take(self) -> tuple[Piece | None, bool]:
        """What has come since the last call, and whether there can be more.

        Raises:
            EngineError: nothing has come, since the model failed; the tokenizer failed.
        """
        with self._changed:
            pieces, self._pieces = self._pieces, []
            if not pieces and self._error is not None:
                error, self._error = self._error, None
                raise EngineError(f"the model failed: {error}") from error
            more = not self._ended or self._error is not None
        return (self._with_text(Piece.joined(pieces)) if pieces else None), more

    def _with_text(self, piece: Piece) -> Piece:
        if self._text is None:
            return piece
        is_end = piece.finish_reason == "stop"  # without stop strings, the last token is an end token
        try:
            text = self._text.add(piece.token_ids[:-1] if is_end else piece.token_ids)
            if piece.finish_reason in ("stop", "length"):
                text += self._text.finish()
        except Exception as error:
            self.cancel()
            _log.error("the tokenizer failed on a request: %s", error, exc_info=error)
            raise EngineError(f"the tokenizer failed: {error}") from error
        return replace(piece, text=text)

    # The engine's side.

    def put(self, piece: Piece) -> None:
        """Add a piece; the last has a `finish_reason`. `wake` tells a coroutine."""
        with self._changed:
            self.completion_tokens += len(piece.token_ids)
            self._pieces.append(piece)
            if len(self._pieces) == _MOST_PIECES:
                self._pieces = [Piece.joined(self._pieces)]
            self._ended = piece.finish_reason is not None
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    @property
    def ended(self) -> bool:
        """Whether the last piece or an error has been put."""
        return self._ended

    @staticmethod
    def wake(streams: Iterable["Stream"]) -> None:
        """Tell the coroutines that read these streams of news: one message per event loop, however many streams."""
        arrived: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for stream in streams:
            with stream._changed:
                if stream._reader is not None:
                    loop, event = stream._reader
                    if not event.is_set():
                        arrived.setdefault(loop, []).append(event)
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
