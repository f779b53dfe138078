"""Text comes as soon as it is certain, the pieces together are the text of all tokens, and counts beside it fit."""

import asyncio
import random
import threading

import pytest
from fake_engine import byte_tokenizer as with_template
from tiny_serving import byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from deltazoo.serving import EngineError, Piece, Request, RequestError, Stream, TextStream, TokenLogprob
from deltazoo.serving import text as text_module
from deltazoo.serving.text import PromptTokens, bytes_of, text_of

TEXT = "Ein Maß für 👩‍🚀 und 日本, 1 € – é́!"


def of_bytes(text):
    content = text.encode() if isinstance(text, str) else text
    token_of = {bytes_of(byte_tokenizer(), token): token for token in range(258)}
    return [token_of[bytes([byte])] for byte in content]


class Reader:
    """A text stream whose tokens come as a test says."""

    def __init__(self, prompt=(0,), stop=(), tokenizer=None):
        self.cancelled = []
        self._stream = Stream(Request(prompt=tuple(prompt), seed=1), lambda: self.cancelled.append(True))
        self.text = TextStream(self._stream, tokenizer or byte_tokenizer(), stop)
        self._pieces = iter(self.text)

    def add(self, tokens, reason=None, logprobs=None):
        piece = Piece(token_ids=tuple(tokens), logprobs=logprobs, finish_reason=reason)
        self._stream.put(piece)
        return next(self._pieces)

    def all_of(self, tokens, at_once=1):
        """The texts of the pieces, up to a stop string."""
        texts, reason = [], None
        for start in range(0, len(tokens), at_once):
            if reason is None:
                end = "length" if start + at_once >= len(tokens) else None
                piece = self.add(tokens[start : start + at_once], end)
                texts.append(piece.text)
                reason = piece.finish_reason
        return texts, reason


def test_characters_come_whole():
    texts, _ = Reader().all_of(of_bytes(TEXT))
    assert [text for text in texts if text] == list(TEXT)


@pytest.mark.parametrize("seed", range(6))
def test_bytes_that_are_no_text(seed):
    tokens = random.Random(seed).choices(range(2, 258), k=400)
    assert "".join(Reader().all_of(tokens)[0]) == byte_tokenizer().decode(tokens)


@pytest.mark.parametrize("tokens", [of_bytes(TEXT * 4), random.Random(1).choices(range(2, 258), k=300)])
def test_several_tokens_at_a_time_make_the_same_text(tokens):
    for at_once in (2, 3, 7, 300):
        assert "".join(Reader([70]).all_of(tokens, at_once)[0]) == byte_tokenizer().decode(tokens)


def byte_fallback():
    """The decoder of SentencePiece vocabularies: bytes are tokens of their own, and a run of them is text or is not."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁bc", "d", "<unk>"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 100])
@pytest.mark.parametrize("prompt", [[257], list("👍🏽🎉".encode())])
def test_characters_of_several_tokens_in_a_row(prompt, count):
    text = "👩‍🚀👍🏽🎉🎉🎉日本語"
    for tokens, expected in (([*text.encode(), 256], text + " a"), ([*"€".encode(), 0xE2, 256, 257], "€\ufffd a bc")):
        assert "".join(Reader(prompt, tokenizer=byte_fallback()).all_of(tokens, count)[0]) == expected


@pytest.mark.parametrize("characters", ["\ufffd".encode(), b"\x80", b"\xf0\x9f\x98", b"\xe2\x82", b"\xe2"])
def test_bytes_that_are_no_text_for_long(characters):
    """Text comes nevertheless, few tokens wait, and a character behind them is whole."""
    reader, made = Reader(), ""
    content = characters * 100 + "€b".encode()
    for count, token in enumerate(of_bytes(content), 1):
        made += reader.add([token], "length" if count == len(content) else None).text
        whole = content[:count].decode(errors="replace")
        assert whole.startswith(made) and len(whole) - len(made) <= 8
    assert made == whole


@pytest.mark.parametrize(
    ("text", "stop", "before"),
    [
        ("one two three", ("two",), "one "),
        ("aaab", ("aab",), "a"),
        ("abcabd", ("abd", "xyz"), "abc"),
        ("x€y", ("€",), "x"),
        ("stop", ("s", "stop"), ""),
        ("abcd", ("bcd", "cd"), "a"),
        ("never", ("stop", "never"), ""),
    ],
)
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_stop_strings(text, stop, before, at_once):
    reader = Reader(stop=stop)
    texts, reason = reader.all_of(of_bytes(text + "xyz" * 2), at_once)
    assert ("".join(texts), reason) == (before, "stop") and bool(reader.cancelled) == (at_once < 100)
    assert not any(x in "".join(texts) for x in stop)


def test_the_token_that_completes_a_stop_string_is_the_last_one_that_counts():
    reader = Reader(stop=("never", "stop"))
    piece = reader.add(of_bytes("one stop, two"))
    assert piece.token_ids == tuple(of_bytes("one stop")) and reader.text.completion_tokens == 8


@pytest.mark.parametrize(
    ("content", "stop", "texts", "reason"),
    [
        (b"one stop\xe2\x82", "p\ufffd", "one sto", "stop"),  # the mark of half a character completes it at the end
        (b"a\xe2\x82", "x", [*"a", "", "\ufffd"], "length"),
        (b"end ab", "abc", [*"end ", "", "ab"], "length"),  # what only began a stop string is text
        (b"ab ab abd", "abc", "ab ab abd", "length"),
    ],
)
def test_text_that_was_held_back(content, stop, texts, reason):
    made, ended = Reader(stop=(stop,)).all_of(of_bytes(content))
    assert ended == reason and (made == texts if isinstance(texts, list) else "".join(made) == texts)


def spaces_before_words():
    vocabulary = {"▁Hello": 0, "▁wide": 1, "▁world": 2, "</s>": 3}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_space_between_prompt_and_answer_stays_and_special_tokens_have_no_text():
    reader = Reader([0], tokenizer=spaces_before_words())
    assert reader.all_of((1, 3, 2) * 9)[0] == [" wide", "", " world"] * 9
    reader = Reader([0], tokenizer=spaces_before_words())
    assert "".join(reader.all_of([1, *[3] * 50, 2])[0]) == " wide world"


def test_an_end_token_has_no_text():
    reader, tokens = Reader(), of_bytes("abc")
    piece = reader.add([*tokens, tokens[0]], "stop")
    assert (piece.text, piece.token_ids, reader.cancelled) == ("abc", (*tokens, tokens[0]), [])


def test_an_error_of_the_tokenizer_ends_the_request(caplog):
    class Broken:
        @property
        def backend_tokenizer(self):
            raise KeyError("nothing")

    reader = Reader(tokenizer=Broken())
    with pytest.raises(EngineError, match="the tokenizer failed"):
        reader.add([4, 5])
    assert reader.cancelled
    assert any(record.exc_info and record.exc_info[0] is KeyError for record in caplog.records)


def entries_of(tokens):
    return tuple(TokenLogprob(token_id=token, logprob=-1.0, top=()) for token in tokens)


class TestLogprobs:
    @pytest.mark.parametrize("at_once", [1, 4, 100])
    def test_offsets_count_the_text_that_was_sent(self, at_once):
        text = "aé€😀b"
        reader, tokens, found, made = Reader(), of_bytes(text), [], ""
        for start in range(0, len(tokens), at_once):
            part = tokens[start : start + at_once]
            piece = reader.add(part, "length" if start + at_once >= len(tokens) else None, entries_of(part))
            made += piece.text
            found += piece.logprobs
            assert all(entry.offset < len(made) for entry in found)
        assert [entry.offset for entry in found] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, text.index("b")]
        assert b"".join(entry.content for entry in found) == text.encode() and made == text

    def test_special_tokens_take_no_place(self):
        tokens = [of_bytes("a")[0], 0, of_bytes("b")[0], 1]
        piece = Reader().add(tokens, "stop", entries_of(tokens))
        assert piece.text == "ab"
        assert [(entry.offset, entry.content) for entry in piece.logprobs] == [
            (0, b"a"),
            (1, None),
            (1, b"b"),
            (2, None),
        ]

    def test_bytes_that_are_no_character_take_the_place_of_their_mark(self):
        tokens = of_bytes(b"\xe2ab")
        piece = Reader().add(tokens, "length", entries_of(tokens))
        assert piece.text == "\ufffdab" and [entry.offset for entry in piece.logprobs] == [0, 1, 2]

    def test_a_space_that_was_not_sent_is_not_counted(self):
        piece = Reader([3], tokenizer=spaces_before_words()).add([0, 2], "length", entries_of([0, 2]))
        assert piece.text == "Hello world"
        assert [(entry.offset, entry.content) for entry in piece.logprobs] == [(0, b"Hello"), (5, b" world")]

    def test_a_stop_string_and_its_tokens_are_left_out(self):
        reader, found = Reader(stop=("stop",)), []
        for token in of_bytes("one stop"):
            found += reader.add([token], None, entries_of([token])).logprobs
        assert [entry.content for entry in found] == [b"o", b"n", b"e", b" "]

    def test_text_that_waits_keeps_its_entries(self):
        reader = Reader(stop=("abc",))
        counts = [len(reader.add([token], None, entries_of([token])).logprobs) for token in of_bytes("abd")]
        assert counts == [0, 0, 3]


def test_bytes_and_texts_of_tokens():
    tokenizer = byte_tokenizer()
    ids = tokenizer("a €", add_special_tokens=False)["input_ids"]
    assert b"".join(bytes_of(tokenizer, token) for token in ids) == "a €".encode()
    texts = [text_of(tokenizer, token, bytes_of(tokenizer, token)) for token in ids]
    assert texts == ["a", " ", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert bytes_of(tokenizer, 1) is None and text_of(tokenizer, 1, None) == "<|eos|>"
    assert bytes_of(tokenizer, 258) is None and text_of(tokenizer, 258, None) == ""
    assert [bytes_of(byte_fallback(), token) for token in (0xE2, 256)] == [b"\xe2", b" a"]


class TestPromptTokens:
    def test_a_text_that_must_be_too_long_is_not_read(self):
        tokenizer = with_template("{{ messages[0].content }}")
        prompts = PromptTokens(tokenizer, 10)
        prompts._thread = prompts._processes = None
        for length in (71, 10**8):
            for work in (prompts.of_text("x" * length), prompts.of_chat([{"content": "x" * length}], {})):
                with pytest.raises(RequestError, match=f"has {length} characters, which are more than 10 tokens"):
                    asyncio.run(work)

    @pytest.mark.parametrize("length", [20, 100_001])
    def test_tokens_are_those_of_the_tokenizer(self, length):
        tokenizer = with_template("<|bos|>{{ messages[0].content }}")
        prompts, text = PromptTokens(tokenizer, None), "ab€ <|eos|>" * (length // 10)
        assert asyncio.run(prompts.of_text(text)) == tokenizer(text)["input_ids"]
        messages = [{"role": "user", "content": text}]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert asyncio.run(prompts.of_chat(messages, {})) == expected

    def test_texts_that_wait_together(self):
        """One call makes the tokens of all, the same as alone; a text that fails fails alone, one that left is out."""
        tokenizer, go = byte_tokenizer(), threading.Event()
        prompts, calls = PromptTokens(tokenizer, None), []

        def tokens(text, **options):
            calls.append(text)
            go.wait(5)
            if "bad" in text:
                raise ValueError("bad text")
            return tokenizer(text, **options)

        prompts.tokenizer = tokens
        texts = ["first", *(f"text {i}" * (i + 1) for i in range(9)), "bad", "left"]

        async def ask():
            asked = []
            for text in texts:
                asked.append(asyncio.create_task(prompts.of_text(text)))
                while not calls:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            asked[-1].cancel()
            await asyncio.sleep(0)
            go.set()
            return await asyncio.gather(*asked, return_exceptions=True)

        *found, bad, left = asyncio.run(ask())
        assert found == [tokenizer(text)["input_ids"] for text in texts[:-2]]
        assert isinstance(bad, ValueError) and isinstance(left, asyncio.CancelledError)
        assert calls == [["first"], texts[1:-1], *texts[1:-1]]

    def test_a_process_that_fails_is_an_error(self, monkeypatch):
        monkeypatch.setattr(text_module, "_CHILD", "raise SystemExit(3)")
        with pytest.raises(EngineError, match="long text ended with status 3"):
            asyncio.run(PromptTokens(byte_tokenizer(), None).of_text("x" * 100_001))

    def test_variables_of_the_template(self):
        prompts = PromptTokens(with_template("{{ messages[0].content }}{% if thinks %}!{% endif %}"), None)
        messages = [{"role": "user", "content": "a"}]

        def text(**variables):
            return byte_tokenizer().decode(asyncio.run(prompts.of_chat(messages, variables)))

        assert (text(), text(thinks=True), text(thinks=False)) == ("a", "a!", "a")
        for name in ("think", "chat_template", "tokenize", "messages"):
            with pytest.raises(RequestError, match=f"the chat template does not read '{name}'") as caught:
                text(**{name: True})
            assert caught.value.param == "chat_template_kwargs"
