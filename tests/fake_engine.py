"""An engine without a model: each request's text follows from its prompt and seed alone, at a pace that a test sets."""

from __future__ import annotations

import copy
import random
import string
import threading
from typing import Any

import tiny_serving

from deltazoo.workbench.serve import Counters, EngineStopped, Piece, QueueFull, Request, RequestError, Stream
from deltazoo.workbench.serve.requests import TokenLogprob

CONTEXT = 5000


def byte_tokenizer(chat_template: str | None = None) -> Any:
    tokenizer = copy.deepcopy(tiny_serving.byte_tokenizer())
    tokenizer.chat_template = chat_template
    return tokenizer


def expected_text(request: Request, seed: int) -> str:
    length = min(request.max_tokens or CONTEXT, CONTEXT - len(request.prompt))
    source = random.Random(f"{request.prompt} {seed if request.temperature else 0}")
    return "".join(source.choices(string.ascii_letters, k=length))


class FakeEngine:
    """Runs `places` requests at a time, a token each per step; a step waits `seconds`, or for `steps` to be released.

    A prompt that holds token 2 makes the model fail at its third token.
    """

    def __init__(self, tokenizer: Any, *, places: int = 8, max_queue: int = 256, seconds: float = 0.001) -> None:
        self.tokenizer, self.places, self.max_queue, self.seconds = tokenizer, places, max_queue, seconds
        self.steps: threading.Semaphore | None = None
        self.requests: list[Request] = []
        self.is_running = False
        self._lock = threading.Lock()
        self._running: dict[Stream, list[Piece]] = {}
        self._waiting: list[Stream] = []
        self._cancelled: set[Stream] = set()
        self.finished = {"stop": 0, "length": 0, "cancelled": 0, "error": 0}

    def __enter__(self) -> FakeEngine:
        self.is_running = True
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop(timeout=0)

    def submit(self, request: Request) -> Stream:
        if not self.is_running:
            raise EngineStopped("it has been stopped")
        if len(request.prompt) >= CONTEXT:
            raise RequestError(f"the prompt has {len(request.prompt)} tokens, and the context limit is {CONTEXT}")
        with self._lock:
            if len(self._waiting) >= self.max_queue:
                raise QueueFull(len(self._waiting), 3)
            self.requests.append(request)
            seed = len(self.requests) if request.seed is None else request.seed
            stream = Stream(request, seed, self._cancelled.add)
            self._waiting.append(stream)
            return stream

    def counters(self) -> Counters:
        return Counters(running=len(self._running), waiting=len(self._waiting), finished=dict(self.finished))

    def stop(self, *, timeout: float | None = None) -> None:
        self.is_running = False
        self._thread.join(timeout)
        for stream in [*self._running, *self._waiting]:
            stream.cancel()
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
            stream = self._waiting.pop(0)
            self._running[stream] = pieces_of(stream)
        changed = list(self._running)
        for stream in changed:
            pieces = self._running[stream]
            piece = Piece(finish_reason="cancelled") if stream in self._cancelled else pieces.pop(0)
            if piece.finish_reason != "cancelled" and 2 in stream.request.prompt and stream.completion_tokens == 2:
                stream.fail(ValueError("a matrix is not what it should be"))
                self.finished["error"] += 1
            else:
                stream.put(piece)
                if piece.finish_reason is not None:
                    self.finished[piece.finish_reason] += 1
            if stream.ended:
                del self._running[stream]
                self._cancelled.discard(stream)
        for stream in [stream for stream in self._waiting if stream in self._cancelled]:
            self._waiting.remove(stream)
            stream.put(Piece(finish_reason="cancelled"))
            self.finished["cancelled"] += 1
            changed.append(stream)
        Stream.wake(changed)


def pieces_of(stream: Stream) -> list[Piece]:
    request = stream.request
    text = expected_text(request, stream.seed)
    ends = [place for stop in request.stop if (place := text.find(stop)) >= 0]
    tokens = stream_tokens(text)
    pieces = []
    for position, (token, character) in enumerate(zip(tokens, text, strict=True)):
        stopped = bool(ends) and position == min(ends)
        last = position == len(tokens) - 1
        logprobs = None
        if request.logprobs is not None:
            others = tuple((token + i, -0.5 - i) for i in range(request.logprobs))
            logprobs = (TokenLogprob(token_id=token, logprob=-0.5, top=others),)
        pieces.append(
            Piece(
                text="" if stopped else character,
                token_ids=(token,),
                logprobs=logprobs,
                finish_reason="stop" if stopped else "length" if last else None,
            )
        )
        if stopped:
            break
    return pieces


_TOKENS: dict[str, int] = {}


def stream_tokens(text: str) -> list[int]:
    if not _TOKENS:
        _TOKENS.update({c: byte_tokenizer()(c)["input_ids"][-1] for c in string.ascii_letters})
    return [_TOKENS[character] for character in text]
