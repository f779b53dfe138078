"""The text of the suite: token streams of a training and a held-out part, and what is known about the held-out one.

A part is one stream of tokens: the files of its packages in order, the beginning token before each. The corpus is one
compressed file, read as a whole.
"""

import hashlib
import io
import json
import lzma
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["TextCorpus", "default_corpus_path"]

_ARRAYS = ("train", "held_out", "token_bytes", "file_starts", "new_identifiers")


@dataclass(frozen=True)
class TextCorpus:
    """Tokens of both parts.

    Raises:
        ValueError: arrays that do not fit each other.
    """

    train: np.ndarray
    """`[N]` uint16."""
    held_out: np.ndarray
    """`[M]` uint16."""
    token_bytes: np.ndarray
    """`[vocabulary]` uint8: UTF-8 bytes of each token, 0 for special tokens."""
    file_starts: np.ndarray
    """`[files]` int32: position in `held_out` of the beginning token of each held-out file."""
    new_identifiers: np.ndarray
    """`[n, 3]` int32, sorted: where in `held_out` an identifier that the training part lacks begins, how many tokens
    complete it after its first one, and its number."""
    tokenizer: str
    """The tokenizer, as JSON of the tokenizers library."""
    manifest: dict[str, Any]
    """What went in: packages, versions, counts."""

    def __post_init__(self) -> None:
        for part in ("train", "held_out"):
            if len(tokens := getattr(self, part)) and int(tokens.max()) >= self.vocab_size:
                raise ValueError(f"the {part} part has token {int(tokens.max())}, the vocabulary {self.vocab_size}")
        if len(self.file_starts) == 0 or self.file_starts[0] != 0 or self.file_starts[-1] >= len(self.held_out):
            raise ValueError(f"file_starts must begin with 0 and end within the {len(self.held_out)} held-out tokens")

    @property
    def vocab_size(self) -> int:
        """Entries of the tokenizer."""
        return len(self.token_bytes)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of tokens, lengths, positions and tokenizer."""
        content = hashlib.sha256(self.tokenizer.encode())
        for name in _ARRAYS:
            array = getattr(self, name)
            content.update(f"{name} {array.dtype.str} {array.shape}".encode())
            content.update(np.ascontiguousarray(array).tobytes())
        return content.hexdigest()

    def save(self, path: Path) -> None:
        """Write the file at once or not at all."""
        packed = io.BytesIO()
        texts = {name: np.frombuffer(text.encode(), dtype=np.uint8) for name, text in self._texts().items()}
        np.savez(packed, **{name: getattr(self, name) for name in _ARRAYS}, **texts)  # type: ignore[arg-type]
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        draft.write_bytes(lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> "TextCorpus":
        """Read a file that `save` wrote.

        Raises:
            ValueError: there is none, or it is another file or damaged.
        """
        if not path.is_file():
            raise ValueError(f"{path} does not exist: make it with python scripts/build_python_text.py")
        try:
            with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
                texts = {name: arrays[name].tobytes().decode() for name in ("tokenizer", "manifest")}
                corpus = cls(
                    **{name: arrays[name] for name in _ARRAYS},
                    tokenizer=texts["tokenizer"],
                    manifest=json.loads(texts["manifest"]),
                )
        except (lzma.LZMAError, EOFError, KeyError, OSError) as error:
            raise ValueError(f"{path} is no corpus of this suite, or damaged: {error}") from error
        if corpus.digest != corpus.manifest["sha256"]:
            raise ValueError(f"{path} is damaged: its content has hash {corpus.digest}, its manifest says otherwise")
        return corpus

    def _texts(self) -> dict[str, str]:
        return {"tokenizer": self.tokenizer, "manifest": json.dumps({**self.manifest, "sha256": self.digest})}


def default_corpus_path() -> Path:
    """Where the corpus is built and looked for unless told otherwise: in the user's cache folder."""
    return Path.home() / ".cache" / "deltazoo" / "python_text.npz.xz"
