"""An engine without a model: each request's text follows from its prompt and seed alone, at a pace that a test sets."""

from __future__ import annotations

import copy
import random
import string
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deltazoo.serving import (
    EngineError,
    EngineStopped,
    Piece,
    QueueFull,
    Request,
    RequestError,
    Status,
)
from deltazoo.serving.requests import FinishReason, Output, TokenLogprob

CONTEXT = 5000


def byte_tokenizer(chat_template: str | None = None) -> Any:
    import tiny_serving  # torch comes with it, which processes that have a tokenizer do not need

    tokenizer = copy.deepcopy(tiny_serving.byte_tokenizer())
    tokenizer.chat_template = chat_template
    return tokenizer


def expected_text(request: Request, seed: int | None) -> str:
    length = min(request.max_tokens or CONTEXT, CONTEXT - len(request.prompt))
    source = random.Random(f"{request.prompt} {seed if request.temperature else 0}")
    return "".join(source.choices(string.ascii_letters, k=length))


@dataclass(eq=False)
class Entry:
    key: Any
    request: Request
    deliver: Any
    made: int = 0


class FakeEngine:
    """Runs `places` requests at a time, a token each per step; a step waits `seconds`, or for `steps` to be released.

    A prompt that holds token 2 makes the model fail at its third token.
    """

    def __init__(self, tokenizer: Any, *, places: int = 8, max_queue: int = 256, seconds: float = 0.001) -> None:
        self.tokenizer, self.places, self.max_queue, self.seconds = tokenizer, places, max_queue, seconds
        self.context_limit = CONTEXT
        ids = getattr(tokenizer, "convert_tokens_to_ids", len)  # a tokenizer may be none
        self._tokens = {letter: ids(letter) for letter in string.ascii_letters}
        self.steps: threading.Semaphore | None = None
        self.requests: list[Request] = []
        self.is_running = False
        self._lock = threading.Lock()
        self._running: dict[Entry, list[Piece]] = {}
        self._waiting: list[Entry] = []
        self._cancelled: set[tuple[Any, Any]] = set()
        self.finished = {"stop": 0, "length": 0, "cancelled": 0, "error": 0}

    def __enter__(self) -> FakeEngine:
        self.is_running = True
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop(timeout=0)

    def cancel(self, keys: Iterable[Any] | None, deliver: Any) -> None:
        with self._lock:
            entries = [*self._running, *self._waiting]
            keys = [entry.key for entry in entries if entry.deliver == deliver] if keys is None else keys
            self._cancelled.update((key, deliver) for key in keys)

    def enter(self, requests: Sequence[tuple[Any, Request]], deliver: Any) -> None:
        if not self.is_running:
            raise EngineStopped("it has been stopped")
        for _, request in requests:
            if len(request.prompt) >= CONTEXT:
                raise RequestError(f"the prompt has {len(request.prompt)} tokens, and the context limit is {CONTEXT}")
        with self._lock:
            if len(self._waiting) + len(requests) > self.max_queue:
                raise QueueFull(len(self._waiting), 3)
            self.requests.extend(request for _, request in requests)
            self._waiting.extend(Entry(key, request, deliver) for key, request in requests)

    def status(self) -> Status:
        counters = Counter(running=len(self._running), waiting=len(self._waiting))
        return Status(self.is_running, counters, Counter(self.finished))

    def stop(self, *, timeout: float | None = None) -> None:
        self.is_running = False
        self._thread.join(timeout)
        for entry in [*self._running, *self._waiting]:
            self._cancelled.add((entry.key, entry.deliver))
        if self.steps is not None:
            self.steps.release(100)
        self._thread.join()

    def _loop(self) -> None:
        pause = threading.Event()
        while self.is_running or self._running or self._waiting:
            if self.steps is None:
                pause.wait(self.seconds)
            else:
                self.steps.acquire()
            with self._lock:
                self._step()

    def _step(self) -> None:
        while self._waiting and len(self._running) < self.places:
            entry = self._waiting.pop(0)
            self._running[entry] = pieces_of(entry.request, self._tokens)
        made: list[tuple[Entry, Output]] = []
        for entry, pieces in [*self._running.items()]:
            output: Output = pieces.pop(0)
            if (entry.key, entry.deliver) in self._cancelled:
                output = Piece(finish_reason="cancelled")
            elif 2 in entry.request.prompt and entry.made == 2:
                output = EngineError("the model failed: a matrix is not what it should be")
            made.append((entry, output))
            entry.made += 1
        for entry in self._waiting:
            if (entry.key, entry.deliver) in self._cancelled:
                made.append((entry, Piece(finish_reason="cancelled")))
        for entry, output in made:
            reason = "error" if isinstance(output, EngineError) else output.finish_reason
            if reason is not None:
                self.finished[reason] += 1
                self._running.pop(entry, None)
                self._waiting = [other for other in self._waiting if other is not entry]
            entry.deliver([(entry.key, output)])


def pieces_of(request: Request, tokens_of: dict[str, int]) -> list[Piece]:
    tokens = [tokens_of[character] for character in expected_text(request, request.seed)]
    pieces = []
    for position, token in enumerate(tokens, 1):
        logprobs = None
        if request.logprobs is not None:
            others = tuple((token + i, -0.5 - i) for i in range(request.logprobs))
            logprobs = (TokenLogprob(token_id=token, logprob=-0.5, top=others),)
        reason: FinishReason | None = "length" if position == len(tokens) else None
        pieces.append(Piece(token_ids=(token,), logprobs=logprobs, finish_reason=reason))
    return pieces
