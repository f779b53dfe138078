"""From the tokens of one request to its text, as far as it is certain, up to a stop string."""

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from deltazoo.serving.requests import EngineError, Piece, Stream

__all__ = ["TextAssembly", "TextStream", "decoder_of"]

_log = logging.getLogger(__name__)

_CONTEXT = 6
"""Tokens of the prompt that are decoded with the first new one: some tokenizers drop a space where a text begins."""
_INCOMPLETE = "\ufffd"
"""What tokenizers put in place of bytes that are no character yet, or never become one."""
_LONGEST = 4
"""Bytes of a character at most, and so tokens."""


def decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """A function from tokens to text without special tokens."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer.backend_tokenizer.decode  # transformers' own method takes eight times as long
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


class TextAssembly:
    """The text of one request.

    Text is held back while its last bytes may be part of a character, or the beginning of a stop string.

    Args:
        decode: from `decoder_of`.
        prompt: the tokens before.
        stop: texts that end the text and are not part of it.

    Attributes:
        stopped: whether a stop string has been found.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._decode = decode
        self._stop = stop
        self._window, text = _last_characters(decode, prompt, _CONTEXT)
        self._before = len(text)
        self._incomplete = 0  # tokens since the text last ended with a whole character
        self._held = ""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that becomes certain with more tokens, the same however many come at a time."""
        text = self._decode([*self._window, *tokens])
        if len(tokens) > 1 and (self._stop or _INCOMPLETE in text):
            return "".join(self.add([token]) for token in tokens)
        self._window += tokens
        self._incomplete = self._incomplete + 1 if text.endswith(_INCOMPLETE) else 0
        if 0 < self._incomplete < _LONGEST:
            return ""
        # So many tokens are no character: only the last bytes may still be a part of one.
        end = max(self._before, len(text) - _LONGEST + 1) if self._incomplete else len(text)
        new, later = text[self._before : end], len(text) - end
        context = 2 * _CONTEXT if self._incomplete else _CONTEXT  # the text that comes later must be in the window
        if len(self._window) > 2 * context:
            self._window, text = _last_characters(self._decode, self._window, context)
        self._before = max(0, len(text) - later)
        return self._certain(new)

    def finish(self) -> str:
        """The text that was held back, once no more tokens come; a stop string may be in it."""
        if self.stopped:
            return ""
        text = self._decode(self._window)
        new, self._before = self._certain(text[self._before :]), len(text)
        held, self._held = self._held, ""
        return new + held

    def _certain(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        found = [start for start in map(text.find, self._stop) if start >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        length = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - length :]
        return text[: len(text) - length]


class TextStream:
    """A stream whose pieces have text, and which a stop string ends. The request is cancelled then.

    Args:
        stream: of `Engine.submit`.
        tokenizer: of the model.
        stop: texts that end the output and are not part of it.

    Attributes:
        completion_tokens: new tokens read so far, up to the one that completes a stop string.

    Raises:
        EngineError: on reading, by the stream, or since the tokenizer failed.
    """

    def __init__(self, stream: Stream, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.request, self.seed, self.prompt_tokens = stream.request, stream.seed, stream.prompt_tokens
        self.cached_tokens = self.completion_tokens = 0
        self.cancel = stream.cancel
        self._stream, self._stop = stream, stop
        self._decode = decoder_of(tokenizer)
        self._text: TextAssembly | None = None

    def __iter__(self) -> Iterator[Piece]:
        """The pieces as they are made; blocks."""
        for piece in self._stream:
            yield (piece := self._with_text(piece))
            if piece.finish_reason is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces as they are made."""
        async for piece in self._stream:
            yield (piece := self._with_text(piece))
            if piece.finish_reason is not None:
                return

    def _with_text(self, piece: Piece) -> Piece:
        try:
            if self._text is None:
                self._text = TextAssembly(self._decode, self.request.prompt, self._stop)
            piece = self._extended(piece, self._text)
        except Exception as error:  # tokenizers raise what they like for tokens that they do not know
            self.cancel()
            _log.error("the tokenizer failed on a request: %s", error, exc_info=error)
            raise EngineError(f"the tokenizer failed: {error}") from error
        self.completion_tokens += len(piece.token_ids)
        self.cached_tokens += piece.cached_tokens
        return piece

    def _extended(self, piece: Piece, assembly: TextAssembly) -> Piece:
        tokens = piece.token_ids[:-1] if piece.finish_reason == "stop" else piece.token_ids  # an end token has no text
        if not self._stop:
            text = assembly.add(tokens)
        else:
            text = ""
            for count, token in enumerate(tokens, 1):
                text += assembly.add([token])
                if assembly.stopped:
                    self.cancel()
                    logprobs = None if piece.logprobs is None else piece.logprobs[:count]
                    return replace(piece, text=text, token_ids=tokens[:count], logprobs=logprobs, finish_reason="stop")
        if piece.finish_reason in ("stop", "length"):
            text += assembly.finish()
        return replace(piece, text=text, finish_reason="stop" if assembly.stopped else piece.finish_reason)


def _last_characters(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], count: int
) -> tuple[list[int], str]:
    """The last tokens, `count` or a few more, and their text; they do not begin inside a character.

    Bytes as tokens of their own (byte fallback) are text only together: behind half a character all of them are none.
    """
    for length in range(count, count + _LONGEST):
        last = list(tokens[-length:])
        text = decode(last)
        if not text.startswith(_INCOMPLETE):
            return last, text
    last = list(tokens[-count:])  # no text, whatever comes before
    return last, decode(last)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
