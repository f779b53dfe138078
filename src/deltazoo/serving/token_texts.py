"""Text and bytes of single tokens, for log-probabilities."""

import re
from functools import lru_cache
from typing import Any

__all__ = ["TokenTexts"]

_ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """The bytes that each token of a tokenizer stands for.

    `tokenizer.decode([token])` is no answer: part of a character decodes to a replacement mark, and some tokenizers
    drop a space at the beginning.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.bytes_of = lru_cache(maxsize=65_536)(self._bytes_of)
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))

    def text_of(self, token: int) -> str:
        """The token's text; one that is no whole text by itself as `bytes:\\xe2\\x82`, as OpenAI's API writes it."""
        content = self.bytes_of(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _bytes_of(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:  # the vocabulary of a model may be padded
            return b""
        if token in self._special:
            return name.encode()
        if self._byte_level and all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
        if byte := _ONE_BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()  # a space in SentencePiece's vocabularies


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level vocabularies write each byte, as a map back.

    Printable characters of Latin-1 stand for themselves, the other bytes for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
