"""Requests to the engine, streams of their outputs, its counters and errors: token ids, no text."""

import queue
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

MOST_LOGPROBS = 20
"""The most other tokens whose log-probabilities a request may ask for, as in OpenAI's interface."""

FinishReason = Literal["stop", "length", "cancelled"]
"""Reason of an end. stop: an end token, or a stop string in the text of the tokens. length: `max_tokens` or the context
limit. cancelled: by the client or a stop of the engine."""


class RequestError(ValueError):
    """A request that cannot be served; `param`: the field that is wrong."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFull(RuntimeError):
    """The error of a full queue; `retry_after`: seconds after which the queue may be shorter."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(waiting, retry_after)
        self.waiting, self.retry_after = waiting, retry_after

    def __str__(self) -> str:
        return f"{self.waiting} requests are waiting: try again in {self.retry_after} seconds"


class EngineStopped(RuntimeError):
    """The error of an engine that takes no requests: it has not been started, it stops, or it has failed."""


class EngineError(RuntimeError):
    """A failure of the model, of the tokenizer or of the engine; `__cause__`: the reason, if known.

    The model also fails on a request if it computes NaN or infinite logits; other requests continue."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and the settings of its continuation.

    Attributes:
        prompt: token numbers, at least one.
        max_tokens: the most new tokens; None: until an end token or the engine's context limit.
        temperature: divisor of the logits; 0 takes the likeliest token, and the filters then have no effect.
        top_k: number of the likeliest tokens among which to draw; None: all.
        top_p: least sum of the probabilities of the tokens among which to draw, likeliest first.
        seed: seed of the draws: the same seed, prompt and parameters give the same tokens. None: a random one.
        ignore_eos: whether to continue after end tokens.
        logprobs: number of the likeliest tokens whose log-probability is reported beside that of every new token; None:
            none is reported.

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
        """The request, with a random seed if it has none."""
        # Many readers of JSON lose digits of numbers with more than 53 bits, and could not send the seed again.
        return self if self.seed is not None else replace(self, seed=random.getrandbits(53))


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """The log-probability of one new token, before temperature and filters.

    Attributes:
        token_id: the token.
        logprob: its log-probability.
        top: the likeliest tokens at this position and their log-probabilities, likeliest first.
        content: bytes of text that the token stands for, set by a `TextStream`; None: a special token, without text.
        offset: characters of the text before the token; if its character has several tokens, before the character.
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
        cached_tokens: in the first piece, the number of the prompt's tokens whose state the prefix cache had.
        text: text of the tokens, set by a `TextStream`; empty otherwise. Incomplete characters, and the possible
            beginning of a stop string, come with a later piece.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    text: str = ""

    @staticmethod
    def joined(parts: "Sequence[int | Piece]") -> "Piece":
        """A piece joined of tokens and pieces, of which there is at least one."""
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
"""A part of a request's output from the engine: a token alone, a piece, or an error that ends it."""


class Stream:
    """The output of one request: an iterator over its pieces, which blocks until one has come.

    Tokens that a reader has not taken become one piece, so a slow reader gets fewer and larger ones. The last piece has
    a `finish_reason`. One thread reads; `cancel` may be called from anywhere.

    Args:
        request: the request, with a seed.
        on_cancel: function that `cancel` calls.
        notify: function called with each new output.

    Attributes:
        cached_tokens: number of the prompt's tokens whose state the prefix cache had; known with the first piece.

    Raises:
        EngineError: when read, if the model failed on the request or the engine is lost.
    """

    def __init__(
        self, request: Request, on_cancel: Callable[[], None], notify: Callable[[Output], None] | None = None
    ) -> None:
        self.request = request
        self.cached_tokens = 0
        self._on_cancel, self._notify = on_cancel, notify
        self._outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._has_ended = False
        """Whether the reader has received the last piece or an error."""

    def cancel(self) -> None:
        """End the request, which frees its row of the batch for the next step; no effect after its end."""
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
        """The next piece: all tokens that have arrived; an error that has arrived is raised after them."""
        made: list[int | Piece] = []
        while not made or self.has_news:
            output = self._outputs.get()
            if isinstance(output, EngineError):
                if made:
                    self._outputs.put(output)  # the last output can be taken again
                    break
                self._has_ended = True
                raise output
            made.append(output)
        piece = Piece.joined(made)
        self._has_ended = piece.finish_reason is not None
        self.cached_tokens += piece.cached_tokens
        return piece

    def put(self, output: Output) -> None:
        """Add an output of the engine."""
        self._outputs.put(output)
        if self._notify is not None:
            self._notify(output)

    @staticmethod
    def put_all(outputs: "Iterable[tuple[Stream, Output]]") -> None:
        """Add outputs of the engine to several streams."""
        for stream, output in outputs:
            stream.put(output)


def is_last(output: Any) -> bool:
    """Whether an output, or another message, is the last of its request."""
    return not isinstance(output, int) and (not isinstance(output, Piece) or output.finish_reason is not None)


@dataclass(frozen=True)
class Status:
    """The numbers of an engine.

    Attributes:
        running: whether it takes requests.
        counters: the numbers of docs/generation.md (`running`, `waiting`, `steps` and so on), by name.
        finished: number of ended requests by finish reason, "error" for those on which the model failed. The engine
            knows no text, so it counts a request that a stop string ended as cancelled.
    """

    running: bool
    counters: Mapping[str, float]
    finished: Mapping[str, int]
