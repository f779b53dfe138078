"""The output of one request, as those read it who asked for it."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from deltazoo.serving.requests import EngineError, Output, Piece, Request
from deltazoo.serving.text_assembly import TextAssembly

__all__ = ["Stream"]

_log = logging.getLogger(__name__)

_MOST_PIECES = 256
"""Pieces that a stream keeps for a reader who does not come, before they become one, which takes less memory."""


class Stream:
    """The output of one request: an iterator over its pieces, for threads (`for`) or coroutines (`async for`).

    Pieces that a reader has not taken become one, so a slow reader gets fewer and larger ones. The last has a
    `finish_reason`. One thread or coroutine reads; `cancel` may be called from anywhere.

    Args:
        request: whose output it is, with a seed.
        on_cancel: called by the first `cancel`.
        decode: from `decoder_of`. Text is made where it is read, so that the engine does not wait for it; but with stop
            strings, and without this, pieces come with their text.

    Attributes:
        seed: of the draws.
        prompt_tokens: of the request.
        cached_tokens: tokens of the prompt that were not run, since the prefix cache had their state; known with the
            first piece.
        completion_tokens: new tokens so far, an end token included.

    Raises:
        EngineError: on reading, if the model or the tokenizer failed on the request, or the engine is lost.
    """

    def __init__(
        self,
        request: Request,
        on_cancel: Callable[["Stream"], None],
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.request = request
        self.seed = request.seed
        self.prompt_tokens = len(request.prompt)
        self.cached_tokens = 0
        self.completion_tokens = 0
        self._on_cancel = on_cancel
        self._decode = None if request.stop else decode
        self._text: TextAssembly | None = None
        self._cancelled = False
        self._changed = threading.Condition()
        self._pieces: list[Piece] = []
        self._error: EngineError | None = None
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
            EngineError: nothing has come, and the request has failed; the tokenizer failed.
        """
        with self._changed:
            pieces, self._pieces = self._pieces, []
            if not pieces and self._error is not None:
                error, self._error = self._error, None
                raise error
            more = not self._ended or self._error is not None
        return (self._with_text(Piece.joined(pieces)) if pieces else None), more

    def _with_text(self, piece: Piece) -> Piece:
        if self._decode is None:
            return piece
        is_end = piece.finish_reason == "stop"  # without stop strings, the last token is an end token
        try:
            if self._text is None:
                self._text = TextAssembly(self._decode, self.request.prompt)
            text = self._text.add(piece.token_ids[:-1] if is_end else piece.token_ids)
            if piece.finish_reason in ("stop", "length"):
                text += self._text.finish()
        except Exception as error:
            self.cancel()
            _log.error("the tokenizer failed on a request: %s", error, exc_info=error)
            raise EngineError(f"the tokenizer failed: {error}") from error
        return replace(piece, text=text)

    # The engine's side.

    @property
    def ended(self) -> bool:
        """Whether the last piece or an error has come."""
        return self._ended

    def put(self, output: Output) -> None:
        """Add what the engine made. `deliver` tells a coroutine, too."""
        with self._changed:
            if isinstance(output, EngineError):
                self._error, self._ended = output, True
            else:
                piece = Piece(token_ids=(output,)) if isinstance(output, int) else output
                self.completion_tokens += len(piece.token_ids)
                self.cached_tokens += piece.cached_tokens
                self._pieces.append(piece)
                if len(self._pieces) == _MOST_PIECES:
                    self._pieces = [Piece.joined(self._pieces)]
                self._ended = piece.finish_reason is not None
            self._changed.notify_all()

    @staticmethod
    def deliver(outputs: Iterable[tuple["Stream", Output]]) -> None:
        """Add outputs to their streams, and tell the readers: one message per event loop, however many streams."""
        arrived: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for stream, output in outputs:
            stream.put(output)
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
