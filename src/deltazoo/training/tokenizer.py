"""Byte-level tokenizers, a BPE trained on the training text or one token per byte; decoding restores every text."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from deltazoo.training.config import TokenizerConfig
from deltazoo.training.console import console, track
from deltazoo.training.corpus import num_bytes
from deltazoo.training.hub import check_on_hub
from deltazoo.training.text import Document

BOS, EOS = "<|bos|>", "<|eos|>"
_ENCODE_AT_ONCE = 256  # documents per call: enough for all cores, few enough for a smooth progress bar


def build_tokenizer(config: TokenizerConfig, documents: Sequence[Document]) -> PreTrainedTokenizerBase:
    """The tokenizer that ``config`` asks for; ``documents`` are the training part.

    Raises:
        ValueError: the text is too small for the vocabulary, or there is no such pretrained tokenizer, or it has no
            token that can begin a document.
    """
    if config.kind == "byte":
        return _wrap(_byte_level(models.BPE(vocab=_byte_vocabulary(), merges=[])))
    if config.kind == "bpe":
        assert config.vocab_size is not None
        return train_bpe(documents, config.vocab_size, config.training_bytes)
    assert config.path is not None
    if not Path(config.path).exists():
        check_on_hub(config.path, "model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer.path {config.path!r} holds no tokenizer: {error}") from error
    begin_id(tokenizer)
    return tokenizer


def train_bpe(documents: Sequence[Document], vocab_size: int, max_bytes: int | None = None) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly ``vocab_size`` entries, ``<|bos|>`` and ``<|eos|>`` included.

    Args:
        documents: the training part, never held-out text.
        vocab_size: at least 259.
        max_bytes: stop reading after this much text.

    Raises:
        ValueError: the text does not hold enough distinct pairs for the vocabulary.
    """
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with console.status(f"training a tokenizer with {vocab_size} entries"):
        tokenizer.train_from_iterator(_texts(documents, max_bytes), trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        found = tokenizer.get_vocab_size()
        raise ValueError(
            f"the training text yields only {found} tokenizer entries, and tokenizer.vocab_size asks for {vocab_size}: "
            f"give more text, or tokenizer.vocab_size={found} or less (on the command line --set "
            f"tokenizer.vocab_size={found})"
        )
    return _wrap(_byte_level(tokenizer.model))


def begin_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token before every document: the tokenizer's BOS, or its EOS if it has no BOS.

    Raises:
        ValueError: it has neither.
    """
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ValueError("the tokenizer has neither a BOS nor an EOS token: nothing could stand before the first token")


def encode_documents(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    description: str = "tokenizing",
    *,
    with_end: bool = False,
) -> list[np.ndarray]:
    """Token ids of each document, the beginning token in front; a special token spelled in a text stays text.

    Args:
        tokenizer: any tokenizer with a BOS or an EOS token.
        documents: what to encode.
        description: shown next to the progress bar.
        with_end: append the tokenizer's EOS token, if it has one, to each document, so that a model learns to stop.

    Returns:
        one array per document, uint16 where the vocabulary fits into it, else int32.
    """
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.int32
    first = [begin_id(tokenizer)]
    last = [tokenizer.eos_token_id] if with_end and tokenizer.eos_token_id is not None else []
    pieces = [documents[i : i + _ENCODE_AT_ONCE] for i in range(0, len(documents), _ENCODE_AT_ONCE)]
    return [
        np.array(first + ids + last, dtype=dtype)
        for piece in (track(pieces, description) if len(pieces) > 1 else pieces)
        for ids in _encode_texts(tokenizer, [document.text for document in piece])
    ]


def _encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        backend = tokenizer.backend_tokenizer
        previous = backend.encode_special_tokens
        # The spelling of a special token inside a document, as in this file, is ordinary text.
        backend.encode_special_tokens = True
        try:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        finally:
            backend.encode_special_tokens = previous
    return [tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] for text in texts]


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {BOS: 0, EOS: 1} | {symbol: index + 2 for index, symbol in enumerate(alphabet)}


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """As a transformers tokenizer; ``tokenizer(prompt)`` then begins with BOS, as every training document does."""
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _texts(documents: Sequence[Document], max_bytes: int | None) -> Iterator[str]:
    seen = 0
    for document in documents:
        if max_bytes is not None and seen >= max_bytes:
            return
        yield document.text
        seen += num_bytes(document)
