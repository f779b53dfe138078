"""The text: token streams of a training and a held-out part, built from installed Python packages.

    python -m experiments.text.corpus [--out FILE]

Nothing of it is distributed: everyone builds it from the packages and versions of benchmarks/results/text_corpus.json,
whose hash tells whether it is the same text. A part is one stream of tokens: the files of its packages in order, the
beginning token before each, near-copies dropped.
"""

import argparse
import hashlib
import io
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

import numpy as np

from deltazoo.training.tokens import begin_id, encode_documents, train_bpe

DEFAULT_PATH = Path.home() / ".cache" / "deltazoo" / "python_text.npz.xz"
"""Where the corpus is built and looked for unless told otherwise."""
_SHINGLE = 3
_COPIED = 0.5
_LETTERS = 0.4
_IDENTIFIER = re.compile(rb"(?<![A-Za-z0-9_\x80-\xff])[A-Za-z_][A-Za-z0-9_]*")
_SHORTEST = 3
_ARRAYS = ("train", "held_out", "token_bytes", "file_starts", "new_identifiers")


@dataclass(frozen=True)
class TextCorpus:
    """Tokens of both parts, and what is known about the held-out one."""

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
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        np.savez(packed, **arrays, tokenizer=np.frombuffer(self.tokenizer.encode(), dtype=np.uint8))
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        draft.write_bytes(lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> "TextCorpus":
        """Read a file that `save` wrote; ValueError: there is none."""
        if not path.is_file():
            raise ValueError(f"{path} does not exist: make it with python -m experiments.text.corpus")
        with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
            tokenizer = arrays["tokenizer"].tobytes().decode()
            return cls(**{name: arrays[name] for name in _ARRAYS}, tokenizer=tokenizer)


@dataclass(frozen=True)
class SourceFile:
    """One Python file of a package."""

    package: str
    path: str
    text: str


def installed_sources(pins: Mapping[str, str]) -> Iterator[SourceFile]:
    """The Python files of installed packages, ordered by package and path.

    Args:
        pins: package -> version.

    Raises:
        ValueError: a package is not installed, or in another version.
    """
    for package, version in sorted(pins.items(), key=lambda pin: pin[0].lower()):
        try:
            found = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            raise ValueError(f"the text needs {package}=={version}, which is not installed") from None
        if found.version.partition("+")[0] != version:  # torch names its CUDA version behind a plus
            raise ValueError(f"the text needs {package}=={version}, installed is {found.version}")
        paths = sorted(str(path) for path in found.files or () if path.suffix == ".py" and path.parts[0] != "..")
        for path in paths:
            try:
                text = Path(str(found.locate_file(path))).read_text(encoding="utf-8")
            except UnicodeDecodeError:  # test data in other encodings
                continue
            yield SourceFile(package, path, text)


def build_corpus(sources: Iterable[SourceFile], held_out: Sequence[str], vocab_size: int) -> TextCorpus:
    """Tokenize the files worth keeping.

    A file is dropped if it has fewer than three lines, if letters are less than 40% of its characters (a table of
    data), or if half of its runs of three lines occur in files kept before it (a near-copy). Lines are compared without
    their indentation, empty ones left out. Training files come first, so that no held-out file is a copy of one.

    Args:
        sources: the files.
        held_out: packages that are not trained on.
        vocab_size: of the byte-level BPE, which is trained on the training part.

    Raises:
        ValueError: a package to be held out is not among the sources, or one part is empty.
    """
    parts: dict[bool, list[SourceFile]] = {False: [], True: []}
    for source in sources:
        parts[source.package in held_out].append(source)
    if missing := set(held_out) - {source.package for source in parts[True]}:
        raise ValueError(f"packages to hold out are not among the sources: {', '.join(sorted(missing))}")
    seen: set[int] = set()
    kept = {part: list(_worth_keeping(files, seen)) for part, files in parts.items()}
    if not all(kept.values()):
        raise ValueError("nothing is left to train on, or nothing held out")

    texts = {part: [source.text for source in files] for part, files in kept.items()}
    tokenizer = train_bpe(texts[False], vocab_size)
    encoded = {part: encode_documents(tokenizer, files) for part, files in texts.items()}
    vocabulary = tokenizer.get_vocab()
    token_bytes = np.zeros(len(vocabulary), dtype=np.uint8)
    for token, number in vocabulary.items():  # the byte-level alphabet writes every byte as one character
        token_bytes[number] = len(token) if number not in tokenizer.all_special_ids else 0
    for part, files in kept.items():
        for source, tokens in zip(files, encoded[part], strict=True):
            size = int(token_bytes[tokens].sum(dtype=np.int64))
            assert size == len(source.text.encode()), source.path
            assert tokens[0] == begin_id(tokenizer)

    starts = np.cumsum([0, *(len(tokens) for tokens in encoded[True])])[:-1]
    known = {name for source in kept[False] for name in _IDENTIFIER.findall(source.text.encode())}
    return TextCorpus(
        train=np.concatenate(encoded[False]).astype(np.uint16),
        held_out=np.concatenate(encoded[True]).astype(np.uint16),
        token_bytes=token_bytes,
        file_starts=starts.astype(np.int32),
        new_identifiers=_new_identifiers(kept[True], encoded[True], token_bytes, known),
        tokenizer=tokenizer.backend_tokenizer.to_str(),
    )


def _worth_keeping(files: Iterable[SourceFile], seen: set[int]) -> Iterator[SourceFile]:
    for source in files:
        lines = [line for line in map(str.strip, source.text.splitlines()) if line]
        if len(lines) < _SHINGLE or _share_of_letters(source.text) < _LETTERS:
            continue
        # Python's own hash of a text differs from process to process, but what is equal does not.
        runs = [hash(tuple(lines[i : i + _SHINGLE])) for i in range(len(lines) - _SHINGLE + 1)]
        if sum(run in seen for run in runs) <= _COPIED * len(runs):
            seen.update(runs)
            yield source


def _share_of_letters(text: str) -> float:
    visible = [character for character in text if not character.isspace()]
    return sum(character.isalpha() for character in visible) / max(1, len(visible))


def _new_identifiers(
    files: Sequence[SourceFile], encoded: Sequence[np.ndarray], token_bytes: np.ndarray, known: set[bytes]
) -> np.ndarray:
    """As `TextCorpus.new_identifiers`: ASCII identifiers of at least three tokens that occur in no training file."""
    numbers: dict[bytes, int] = {}
    found = []
    first_token = 0
    for source, tokens in zip(files, encoded, strict=True):
        begins = np.cumsum([0, *token_bytes[tokens].tolist()])
        for match in _IDENTIFIER.finditer(source.text.encode()):
            if match.group() in known:
                continue
            # The last token that begins at the identifier's first byte or before it; the beginning token has no bytes.
            first = int(np.searchsorted(begins, match.start(), side="right")) - 1
            last = int(np.searchsorted(begins, match.end(), side="right")) - 1  # the first token that reaches beyond
            completing = last - first - 1
            if completing + 1 >= _SHORTEST:
                found.append((first_token + first, completing, numbers.setdefault(match.group(), len(numbers))))
        first_token += len(tokens)
    return np.array(found, dtype=np.int32).reshape(-1, 3)


def main() -> None:
    """Build the text again from the packages of the manifest and keep it if its hash is the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_PATH)
    arguments = parser.parse_args()
    manifest = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "text_corpus.json"
    known = json.loads(manifest.read_text(encoding="utf-8"))
    pins = {package["package"]: package["version"] for package in known["packages"]}
    held_out = [package["package"] for package in known["packages"] if package["part"] == "held out"]
    corpus = build_corpus(installed_sources(pins), held_out, known["vocab_size"])
    if corpus.digest != known["sha256"]:
        raise SystemExit(f"built a text with hash {corpus.digest}, not that of {manifest.name}: {known['sha256']}")
    corpus.save(arguments.out)
    print(f"{len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out: {arguments.out}")


if __name__ == "__main__":
    main()
