"""A tokenizer of bytes and models for it, for tests of the server."""

import functools
from typing import Any

from tiny_models import tiny_model
from transformers import PreTrainedTokenizerBase

from deltazoo.models import DeltaRuleForCausalLM
from deltazoo.training.config import TokenizerConfig
from deltazoo.training.tokens import build_tokenizer


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte: 0 begins a text, 1 ends it, byte symbols follow."""
    return build_tokenizer(TokenizerConfig("byte"), [])


def tiny(case: str = "gated_deltanet", **options: Any) -> DeltaRuleForCausalLM:
    """A model over these tokens."""
    return tiny_model(case, **{"vocab_size": 258, **options})
