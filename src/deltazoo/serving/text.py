"""Text and tokens: prompts become token ids, and new tokens become text up to a stop string."""

import asyncio
import copy
import inspect
import logging
import pickle
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deltazoo.serving.requests import EngineError, Piece, RequestError, Stream, TokenLogprob

_log = logging.getLogger(__name__)

_LONG = 100_000
"""Characters of a text from which on a process of its own tokenizes it."""
_CHILD = """
import pickle, sys
tokenizer, text, options = pickle.load(sys.stdin.buffer)
pickle.dump(tokenizer(text, **options)["input_ids"], sys.stdout.buffer)
"""
_CONTEXT = 6
"""Tokens of the prompt that are decoded with the first new one, since some tokenizers drop a space at the beginning."""
_INCOMPLETE = "\ufffd"
"""The replacement character, in place of bytes that are not or not yet a character."""
_MOST_PENDING = 8
"""Number of tokens without text that are decoded although incomplete: twice the bytes of a character."""
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
_ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError for a tokenizer of another library than tokenizers, which cannot decode streams."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        name = type(tokenizer).__name__
        raise ValueError(f"a server needs a tokenizer of the tokenizers library (tokenizer.json), got a {name}")


class PromptTokens:
    """Token ids of texts and chats.

    A thread makes them, since a tokenizer does not serve several threads; the tokenizers library divides the waiting
    texts among all processors. A long text gets a process, so that others do not wait for it; when its request is
    cancelled, the process ends.

    Args:
        context_limit: most tokens of a prompt; None: any number.
    """

    def __init__(self, tokenizer: Any, context_limit: int | None) -> None:
        self.tokenizer = tokenizer
        self._limit = context_limit
        self._longest = max(map(len, tokenizer.get_vocab()))
        self._thread = ThreadPoolExecutor(1, "deltazoo tokenizer")
        self._waiting: dict[bool, deque[tuple[str, Future[list[int]]]]] = {True: deque(), False: deque()}
        """Short texts and the futures of their tokens, by whether special tokens are added."""
        self._processes = asyncio.Semaphore(2)

    async def of_text(self, text: str) -> list[int]:
        """Token ids of a prompt; RequestError for a string that is no Unicode text, or certainly exceeds the context
        limit."""
        self._check("prompt", [text])
        return await self._tokens(text)

    async def of_chat(self, messages: list[dict[str, str]], variables: dict[str, Any]) -> list[int]:
        """Token ids of messages by the chat template; RequestError if it refuses them or does not read a variable."""
        self._check("messages", [text for message in messages for text in message.values()])
        template = str(self.tokenizer.chat_template)
        taken = {"messages", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        for name in variables:
            if name in taken or not re.search(rf"\b{re.escape(name)}\b", template):
                raise RequestError(f"the chat template does not read {name!r}", param="chat_template_kwargs")
        options = {"tokenize": False, "add_generation_prompt": True, **variables}
        try:
            text = await self._in_thread(self.tokenizer.apply_chat_template, messages, **options)
        except Exception as error:  # templates raise errors of any class
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return await self._tokens(text, special=False)

    async def text_of(self, tokens: list[int]) -> str:
        """Text of token ids of a prompt, to be repeated before the answer."""
        try:
            return await self._in_thread(self.tokenizer.decode, tokens)
        except (OverflowError, TypeError, ValueError) as error:
            message = f"prompt has a token that the tokenizer does not know: {error}"
            raise RequestError(message, param="prompt") from None

    def _check(self, param: str, texts: Sequence[str]) -> None:
        length = sum(map(len, texts))
        if self._limit is not None and length > self._limit * self._longest:
            raise RequestError(
                f"{param} has {length} characters, which are more than {self._limit} tokens, the context limit",
                param=param,
            )
        try:  # JSON can hold halves of surrogate pairs, and no tokenizer takes them
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{param} is no text: {error}", param=param) from None

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The result of work in the thread; work that waits is dropped when it is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments, **options))

    def _make_tokens(self, special: bool) -> None:
        """Make the tokens of waiting texts, with no more characters together than one text may have."""
        batch, length = list[tuple[str, Future[list[int]]]](), 0
        while (waiting := self._waiting[special]) and length + len(waiting[0][0]) <= _LONG:
            text, tokens = waiting.popleft()
            length += len(text)
            if tokens.set_running_or_notify_cancel():
                batch.append((text, tokens))
        try:
            found = (
                self.tokenizer([text for text, _ in batch], add_special_tokens=special)["input_ids"] if batch else []
            )
            for (_, tokens), ids in zip(batch, found, strict=True):
                tokens.set_result(ids)
        except Exception:  # an error about one text must not fail the others
            for text, tokens in batch:
                try:
                    tokens.set_result(self.tokenizer(text, add_special_tokens=special)["input_ids"])
                except Exception as error:
                    tokens.set_exception(error)

    async def _tokens(self, text: str, special: bool = True) -> list[int]:
        if len(text) <= _LONG:
            tokens: Future[list[int]] = Future()
            self._waiting[special].append((text, tokens))
            self._thread.submit(self._make_tokens, special)  # one call per text, so that no text is left
            return await asyncio.wrap_future(tokens)
        async with self._processes:
            work = await self._in_thread(pickle.dumps, (self.tokenizer, text, {"add_special_tokens": special}))
            pipe = asyncio.subprocess.PIPE
            command = (sys.executable, "-c", _CHILD)  # in a session of its own, which Ctrl-C does not reach
            child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
            try:
                made, _ = await child.communicate(work)
            finally:
                if child.returncode is None:
                    child.kill()
        if child.returncode != 0:
            raise EngineError(f"the process that makes tokens of a long text ended with status {child.returncode}")
        return pickle.loads(made)


class TextStream:
    """A stream whose pieces have text. A stop string ends it and cancels the request.

    Text is held back while it may be the beginning of a stop string, and log-probabilities until their text is
    complete.

    Args:
        stream: result of `Engine.submit`.
        tokenizer: tokenizer of the model, of the tokenizers library.
        stop: texts that end the output and are not part of it.

    Attributes:
        completion_tokens: new tokens read so far, up to the one that completes a stop string.

    Raises:
        EngineError: when read, from the stream, or because the tokenizer failed.
    """

    def __init__(self, stream: Stream, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.stream = stream
        self.completion_tokens = 0
        self._tokenizer, self._stop = tokenizer, stop
        self._characters: _Characters | None = None
        self._length = 0  # length of the text so far
        self._held = ""
        self._entries: list[TokenLogprob] = []

    def __iter__(self) -> Iterator[Piece]:
        finish_reason = None
        while finish_reason is None:
            yield (piece := self.take())
            finish_reason = piece.finish_reason

    def take(self) -> Piece:
        """The next piece; see `Stream.take`."""
        piece = self.stream.take()
        try:
            piece = self._extended(piece)
        except Exception as error:  # tokenizers raise errors of any class for unknown tokens
            self.stream.cancel()
            _log.error("the tokenizer failed on a request: %s", error, exc_info=error)
            raise EngineError(f"the tokenizer failed: {error}") from error
        self.completion_tokens += len(piece.token_ids)
        return piece

    def _extended(self, piece: Piece) -> Piece:
        characters = self._characters = self._characters or _Characters(self._tokenizer, self.stream.request.prompt)
        ends, tokens = piece.finish_reason in ("stop", "length"), piece.token_ids
        with_text = tokens[:-1] if piece.finish_reason == "stop" else tokens  # an end token has no text
        text, stopped, count = "", False, len(tokens)
        if not self._stop and piece.logprobs is None:
            text, tokens = characters.add_all(with_text), ()
        for count, token in enumerate(tokens, 1):
            at, whole = self._length + len(text) + len(self._held), not characters.pending
            new = characters.add(token) if count <= len(with_text) else ""
            if piece.logprobs is not None:
                self._describe(piece.logprobs[count - 1], at, new, whole and not characters.pending)
            certain, stopped = self._certain(new)
            text += certain
            if stopped:
                break
        if ends and not stopped:
            certain, stopped = self._certain(characters.finish())
            text += certain + self._held
        if stopped:
            self.stream.cancel()
        self._length += len(text)
        all_came = ends and not stopped
        logprobs = tuple(entry for entry in self._entries if all_came or entry.offset < self._length)
        self._entries = self._entries[len(logprobs) :]
        return replace(
            piece,
            text=text,
            token_ids=piece.token_ids[:count],
            logprobs=None if piece.logprobs is None else logprobs,
            finish_reason="stop" if stopped else piece.finish_reason,
        )

    def _describe(self, logprob: TokenLogprob, at: int, new: str, whole: bool) -> None:
        """Keep a log-probability until its text, which begins at `at`, is complete."""
        content = bytes_of(self._tokenizer, logprob.token_id)
        own = None if content is None else content.decode(errors="ignore")
        if whole and new:  # without the space that a tokenizer drops where a text begins
            content = new.encode()
        elif own and content == own.encode() and new.endswith(own):  # after bytes that are no character
            at += len(new) - len(own)
        self._entries.append(replace(logprob, content=content, offset=at))

    def _certain(self, new: str) -> tuple[str, bool]:
        """Text that cannot be part of a stop string, up to the first one, and whether there is one."""
        text = self._held + new
        found = [start for start in map(text.find, self._stop) if start >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class _Characters:
    """The whole characters of one request's tokens, without special tokens; `pending` tokens have given no text yet.

    `DecodeStream` waits for a character while the last bytes are incomplete, and fails if they change the characters
    before them. Then the waiting tokens are decoded by themselves, except those that may begin a character.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._backend, self._decode = tokenizer.backend_tokenizer, tokenizer.backend_tokenizer.decode
        ends = (list(prompt[-length:]) for length in range(_CONTEXT, _CONTEXT + 4))
        self._context = next((end for end in ends if _INCOMPLETE not in self._decode(end)), [])
        self.pending: list[int] = []
        self._stream = DecodeStream(self._context, skip_special_tokens=True)

    def add_all(self, tokens: Sequence[int]) -> str:
        """New text of several tokens, equal to that of `add` for each, in fewer calls."""
        ahead = text = None
        with suppress(Exception):  # tokenizers before 0.23 cannot copy a stream
            ahead = copy.copy(self._stream)
            text = ahead.step(self._backend, list(tokens))
        if ahead is None or text is None or _INCOMPLETE in text:
            return "".join(map(self.add, tokens))
        self._stream, self.pending = ahead, []
        return text

    def add(self, token: int) -> str:
        """New text after a token."""
        self.pending.append(token)
        try:
            text = self._stream.step(self._backend, token)
        except Exception:  # "Invalid prefix": the earlier bytes are no characters together with these
            return self.finish()
        if text is not None:
            self.pending = []
        elif len(self.pending) == _MOST_PENDING:
            whole = self._decode(self.pending)
            for kept in (3, 2, 1):
                over, last = self.pending[:-kept], self.pending[-kept:]
                if self._decode(last) == _INCOMPLETE and self._decode(over) + _INCOMPLETE == whole:
                    return self.finish(kept)
            return self.finish()
        return text or ""

    def finish(self, kept: int = 0) -> str:
        """Text of the waiting tokens although they may be incomplete; the last `kept` tokens continue to wait."""
        over, last = self.pending[: len(self.pending) - kept], self.pending[len(self.pending) - kept :]
        self._stream, self.pending = DecodeStream(self._context, skip_special_tokens=True), last
        if last:
            self._stream.step(self._backend, last)
        before, text = self._decode(self._context), self._decode([*self._context, *over])
        return text.removeprefix(before) if text.startswith(before) else self._decode(over)


@lru_cache(65_536)
def bytes_of(tokenizer: Any, token: int) -> bytes | None:
    """Bytes of text that a token stands for; None for special tokens and unused numbers.

    `tokenizer.decode([token])` does not give them: part of a character decodes to a replacement character, and some
    tokenizers drop a space at the beginning.
    """
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None or token in tokenizer.all_special_ids:  # the vocabulary of a model may be padded
        return None
    if "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder) and all(character in _BYTE_OF for character in name):
        return bytes(_BYTE_OF[character] for character in name)
    if byte := _ONE_BYTE.fullmatch(name):
        return bytes([int(byte[1], 16)])
    return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()  # a space in SentencePiece's vocabularies


def text_of(tokenizer: Any, token: int, content: bytes | None) -> str:
    """A token in the notation of OpenAI's API: its text, `bytes:\\xe2\\x82` for part of a character, or its name."""
    if content is None:
        return tokenizer.convert_ids_to_tokens(token) or ""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
