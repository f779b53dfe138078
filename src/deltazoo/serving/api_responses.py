"""Responses of the HTTP server as JSON objects: whole ones, and the chunks of streams."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from deltazoo import __version__
from deltazoo.serving.requests import Piece, TokenLogprob
from deltazoo.serving.text_assembly import TextStream
from deltazoo.serving.token_texts import TokenTexts

__all__ = ["Answer", "ChatAnswer", "CompletionAnswer", "usage_of"]


class Answer(ABC):
    """The parts of one response that its chunks share; a subclass per endpoint.

    Args:
        model: the name under which the model is served.
        texts: of tokens, for log-probabilities.
    """

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, texts: TokenTexts) -> None:
        self.texts = texts
        self._common = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"deltazoo-{__version__}",
        }

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """A response that is not streamed."""
        return {**self._common, "object": self.whole_object, "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """One chunk of a stream; the one with `usage` has no choices."""
        chunk = {**self._common, "object": self.chunk_object, "choices": choices}
        return chunk if usage is None else {**chunk, "usage": usage}

    @abstractmethod
    def begin(self, index: int) -> dict[str, Any] | None:
        """What a choice's first chunk holds before any text, if anything."""

    @abstractmethod
    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """A choice of a chunk."""

    @abstractmethod
    def choice(self, index: int, output: Piece) -> dict[str, Any]:
        """A choice of a whole response."""


class CompletionAnswer(Answer):
    """Of `/v1/completions`.

    Args:
        echoes: the prompt of each choice, where the text begins with it.
    """

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, model: str, texts: TokenTexts, echoes: Sequence[str] | None) -> None:
        super().__init__(model, texts)
        self._echoes = echoes
        self._lengths: dict[int, int] = {}

    def begin(self, index: int) -> dict[str, Any] | None:
        """The prompt, if it was asked for."""
        if self._echoes is None:
            return None
        return {"index": index, "text": self._echoes[index], "logprobs": None, "finish_reason": None}

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """New text, its log-probabilities, and at the end the reason."""
        return {
            "index": index,
            "text": piece.text,
            "logprobs": None if piece.logprobs is None else self._logprobs(index, piece.logprobs),
            "finish_reason": piece.finish_reason,
        }

    def choice(self, index: int, output: Piece) -> dict[str, Any]:
        """Text, log-probabilities, and why it ended."""
        choice = self.part(index, output)
        return choice if self._echoes is None else {**choice, "text": self._echoes[index] + output.text}

    def _logprobs(self, index: int, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Lists with an entry per token; `text_offset` counts the characters of the choice's tokens before it."""
        texts: list[str] = []
        offsets: list[int] = []
        length = self._lengths.get(index, 0)
        found = list(logprobs)
        for token in found:
            offsets.append(length)
            texts.append(self.texts.text_of(token.token_id))
            # Of a character in several tokens, the last byte that is not a continuation counts.
            length += len(self.texts.bytes_of(token.token_id).decode(errors="ignore"))
        self._lengths[index] = length
        return {
            "tokens": texts,
            "token_logprobs": [_in_json(token.logprob) for token in found],
            "top_logprobs": [
                {
                    self.texts.text_of(other): _in_json(value)
                    for other, value in [*token.top, (token.token_id, token.logprob)]
                }
                for token in found
            ],
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    """Of `/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def begin(self, index: int) -> dict[str, Any] | None:
        """The role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """New text, its log-probabilities, and at the end the reason."""
        delta = {"content": piece.text} if piece.text else {}
        logprobs = None if piece.logprobs is None else self._logprobs(piece.logprobs)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def choice(self, index: int, output: Piece) -> dict[str, Any]:
        """The message, log-probabilities, and why it ended."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
        }

    def _logprobs(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(entry.token_id, entry.logprob),
                    "top_logprobs": [self._token(other, value) for other, value in entry.top],
                }
                for entry in logprobs
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.texts.text_of(token),
            "logprob": _in_json(logprob),
            "bytes": list(self.texts.bytes_of(token)),
        }


def _in_json(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API writes -9999 for what is next to impossible."""
    return max(logprob, -9999.0)


def usage_of(streams: Sequence[TextStream], choices_per_prompt: int) -> dict[str, Any]:
    """Numbers of tokens of a response; a prompt with several choices counts once.

    Args:
        streams: one per choice, those of a prompt side by side.
        choices_per_prompt: how many those are.
    """
    prompts = streams[::choices_per_prompt]
    prompt_tokens = sum(stream.prompt_tokens for stream in prompts)
    completion_tokens = sum(stream.completion_tokens for stream in streams)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(stream.cached_tokens for stream in prompts)},
    }
