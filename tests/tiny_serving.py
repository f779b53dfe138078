"""A tokenizer of bytes and models for it, for tests of the server."""

import functools
from typing import Any

from tiny_models import tiny_model
from tokenizers import models
from transformers import PreTrainedTokenizerBase

from deltazoo.models import DeltaRuleForCausalLM
from deltazoo.workbench.train.tokenizer import _byte_level, _byte_vocabulary, _wrap


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte: 0 begins a text, 1 ends it, byte symbols follow."""
    return _wrap(_byte_level(models.BPE(vocab=_byte_vocabulary(), merges=[])))


def tiny(case: str = "gated_deltanet", **options: Any) -> DeltaRuleForCausalLM:
    """A model over these tokens."""
    return tiny_model(case, **{"vocab_size": 258, **options})
