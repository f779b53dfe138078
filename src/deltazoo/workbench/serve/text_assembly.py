"""From the tokens of one request to its text, as far as it is certain, up to a stop string."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

__all__ = ["TextAssembly", "decoder_of"]

_CONTEXT = 6
"""Tokens of the prompt that are decoded with the first new one: some tokenizers drop a space where a text begins."""
_INCOMPLETE = "\ufffd"
"""What tokenizers put in place of bytes that are no character yet."""


def decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """A function from tokens to text without special tokens."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer.backend_tokenizer.decode  # transformers' own method takes eight times as long
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


class TextAssembly:
    """The text of one request.

    Text is held back while its last bytes are no character, or while it may be the beginning of a stop string.

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
        self._window = list(prompt[-_CONTEXT:])
        self._before = len(decode(self._window))
        self._held = ""

    def add(self, token: int) -> str:
        """The text that becomes certain with one more token."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_INCOMPLETE):
            return ""
        new = text[self._before :]
        if len(self._window) > 2 * _CONTEXT:
            self._window = self._window[-_CONTEXT:]
            text = self._decode(self._window)
        self._before = len(text)
        return self._certain(new)

    def finish(self) -> str:
        """The text that was held back, once no more tokens come."""
        if self.stopped:
            return ""
        text = self._held + self._decode(self._window)[self._before :]
        self._held, self._before = "", len(self._decode(self._window))
        return text

    def _certain(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        found = [place for place in map(text.find, self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        length = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - length :]
        return text[: len(text) - length]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
