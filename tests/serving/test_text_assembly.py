"""Text comes as soon as it is certain, and all pieces together are what the tokenizer makes of all tokens."""

import random

import pytest
from tiny_serving import byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from deltazoo.serving import EngineError, Piece, Request, Stream, TextStream, TokenLogprob
from deltazoo.serving.text_assembly import TextAssembly, decoder_of

TEXT = "Ein Maß für 👩‍🚀 und 日本, 1 € – é́!"


def of_bytes(text):
    return byte_tokenizer()(text, add_special_tokens=False)["input_ids"]


def assembled(tokens, prompt=(), stop=()):
    text = TextAssembly(decoder_of(byte_tokenizer()), prompt, stop)
    pieces = []
    for token in tokens:
        if not text.stopped:
            pieces.append(text.add([token]))
    return pieces, text


def test_characters_come_whole():
    pieces, text = assembled(of_bytes(TEXT))
    assert "".join(pieces) == TEXT and text.finish() == ""
    assert [piece for piece in pieces if piece] == list(TEXT)


def test_bytes_that_are_no_text():
    tokens = random.Random(0).choices(range(2, 258), k=400)
    pieces, text = assembled(tokens)
    assert "".join(pieces) + text.finish() == byte_tokenizer().decode(tokens)
    assert text.finish() == ""
    pieces, text = assembled(of_bytes("a€")[:-1])
    assert pieces == ["a", "", ""] and text.finish() == "\ufffd"


@pytest.mark.parametrize("tokens", [of_bytes(TEXT * 4), random.Random(1).choices(range(2, 258), k=300)])
def test_several_tokens_at_a_time_make_the_same_text(tokens):
    drawn = random.Random(2)
    for _ in range(20):
        text, made, start = TextAssembly(decoder_of(byte_tokenizer()), [70]), "", 0
        while start < len(tokens):
            count = drawn.randrange(7)
            made += text.add(tokens[start : start + count])
            start += count
        assert made + text.finish() == byte_tokenizer().decode(tokens)


def byte_fallback():
    """The decoder of SentencePiece vocabularies: bytes are tokens of their own, and a run of them is text or is not."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁bc", "d", "<unk>"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend.decode


@pytest.mark.parametrize("prompt", [[257], list("👍🏽🎉".encode())])
@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_characters_of_several_tokens_in_a_row(prompt, count):
    expected = "👩‍🚀👍🏽🎉🎉🎉日本語 a"
    tokens, text = [*expected.removesuffix(" a").encode(), 256], TextAssembly(byte_fallback(), prompt)
    made = "".join(text.add(tokens[start : start + count]) for start in range(0, len(tokens), count))
    assert made + text.finish() == expected


@pytest.mark.parametrize("count", [2, 5, 6])
def test_half_a_character_is_the_same_text_however_many_tokens_come(count):
    tokens = [*"€".encode(), 0xE2, 256, 257]
    one, several = (TextAssembly(byte_fallback(), [257]) for _ in range(2))
    made = "".join(several.add(tokens[start : start + count]) for start in range(0, len(tokens), count))
    assert made == "".join(one.add([token]) for token in tokens) and made.endswith(" a bc")


@pytest.mark.parametrize(
    "characters", ["\ufffd".encode(), b"\x80", b"\xf0\x9f\x98", b"\xe2\x82", bytes(range(0x70, 0x100))]
)
def test_bytes_that_are_no_text_for_long(characters):
    """Text comes nevertheless, and no more is decoded for each token."""
    lengths = []

    def decode(tokens):
        lengths.append(len(tokens))
        return bytes(tokens).decode(errors="replace")

    tokens = random.Random(0).choices(characters, k=300) if len(characters) > 3 else list(characters * 100)
    text, made = TextAssembly(decode, []), ""
    for count, token in enumerate(tokens, 1):
        made += text.add([token])
        whole = bytes(tokens[:count]).decode(errors="replace")
        assert whole.startswith(made) and len(whole) - len(made) <= 3
    assert made + text.finish() == whole and max(lengths) <= 26


@pytest.mark.parametrize(
    ("text", "stop", "before"),
    [
        ("one two three", ("two",), "one "),
        ("aaab", ("aab",), "a"),
        ("abcabd", ("abd", "xyz"), "abc"),
        ("x€y", ("€",), "x"),
        ("stop", ("s", "stop"), ""),
        ("abcd", ("bcd", "cd"), "a"),
    ],
)
def test_stop_strings(text, stop, before):
    pieces, assembly = assembled(of_bytes(text), stop=stop)
    assert "".join(pieces) == before and assembly.stopped and assembly.finish() == ""
    assert not any(x in "".join(pieces) for x in stop)


def test_a_stop_string_before_half_a_character():
    text = TextAssembly(lambda tokens: b"".join(tokens).decode(errors="replace"), [], ("stop",))
    assert [text.add([b"on"]), text.add([b"e stop\xe2"])] == ["on", ""]
    assert text.finish() == "e " and text.stopped and text.finish() == ""


def test_what_only_began_a_stop_string_is_text():
    pieces, text = assembled(of_bytes("end ab"), stop=("abc",))
    assert "".join(pieces) == "end " and text.finish() == "ab"
    pieces, text = assembled(of_bytes("ab ab abd"), stop=("abc",))
    assert "".join(pieces) == "ab ab abd" and not text.stopped


def test_a_space_between_prompt_and_answer_stays():
    vocabulary = {"▁Hello": 0, "▁wide": 1, "▁world": 2, "</s>": 3}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = TextAssembly(decoder_of(tokenizer), [0])
    assert [text.add([token]) for token in (1, 3, 2) * 9] == [" wide", "", " world"] * 9


def test_tokenizers_without_a_backend():
    class Plain:
        def decode(self, tokens, skip_special_tokens):
            assert skip_special_tokens
            return "".join(chr(token) for token in tokens)

    assert TextAssembly(decoder_of(Plain()), [65]).add([66]) == "B"


class TestTextStream:
    def read(self, *outputs, tokenizer=None, **options):
        """The pieces, and whether the request was cancelled."""
        cancelled = []
        stream = Stream(Request(prompt=(0,), seed=1), cancelled.append)
        Stream.deliver((stream, output) for output in outputs)
        text = TextStream(stream, tokenizer or byte_tokenizer(), **options)
        pieces = [*text]
        assert text.completion_tokens == sum(len(piece.token_ids) for piece in pieces)
        return pieces, bool(cancelled)

    def test_an_end_token_has_no_text(self):
        tokens = of_bytes("abc")
        pieces, cancelled = self.read(*tokens, Piece(token_ids=(tokens[0],), finish_reason="stop"))
        assert pieces == [Piece(token_ids=(*tokens, tokens[0]), text="abc", finish_reason="stop")] and not cancelled

    def test_a_stop_string_ends_the_request_at_its_last_token(self):
        tokens = of_bytes("one stop, two")
        entries = [TokenLogprob(token_id=token, logprob=-1.0, top=()) for token in tokens]
        made = [Piece(token_ids=(entry.token_id,), logprobs=(entry,)) for entry in entries]
        pieces, cancelled = self.read(*made, stop=("never", "stop"))
        expected = Piece(token_ids=tuple(tokens[:8]), logprobs=tuple(entries[:8]), text="one ", finish_reason="stop")
        assert pieces == [expected] and cancelled

    def test_a_stop_string_in_text_that_was_held_back(self):
        """The last token completes the stop string and begins a character, for which text waits."""

        class Tokenizer:
            def decode(self, tokens, **_):
                return "one stop\ufffd" if 2 in tokens else ""

        end = Piece(token_ids=(2,), finish_reason="length")
        pieces, _ = self.read(end, tokenizer=Tokenizer(), stop=("stop",))
        assert [(piece.text, piece.finish_reason) for piece in pieces] == [("one ", "stop")]

    def test_an_error_of_the_tokenizer_ends_the_request(self, caplog):
        class Tokenizer:
            def decode(self, tokens, **_):
                raise KeyError(tokens)

        with pytest.raises(EngineError, match="the tokenizer failed"):
            self.read(4, 5, tokenizer=Tokenizer())
        assert any(record.exc_info and record.exc_info[0] is KeyError for record in caplog.records)
