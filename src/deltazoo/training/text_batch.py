"""A batch of text to diagnose a model on."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from deltazoo.training.text import Document
from deltazoo.training.tokenizer import encode_documents

__all__ = ["text_batch"]


def text_batch(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], length: int, max_tokens: int
) -> dict[str, Tensor]:
    """The beginnings of documents as `input_ids` and `attention_mask` `[B, T]`, padded on the right.

    Args:
        tokenizer: of the model.
        documents: one or more.
        length: tokens of a document at most.
        max_tokens: no document is added beyond this many tokens in all; the first one is always there.
    """
    rows: list[list[int]] = []
    for document in documents:
        (ids,) = encode_documents(tokenizer, [document])
        if rows and sum(map(len, rows)) + min(len(ids), length) > max_tokens:
            break
        rows.append(ids[:length].tolist())
    longest = max(map(len, rows))
    padded = [row + [row[-1]] * (longest - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}
