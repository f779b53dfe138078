"""What tests of trainers share."""

import pytest
from tiny_models import VOCAB
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words are the token numbers: TRL asks for a tokenizer, although the documents come as numbers."""
    words = {str(i): i for i in range(VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=str(VOCAB - 2), eos_token=str(VOCAB - 1))
