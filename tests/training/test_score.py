"""Bits per byte: every byte of a document counts, however documents are packed or cut."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

import deltazoo.models  # noqa: F401
from deltazoo.training.config import TokenizerConfig
from deltazoo.training.score import packs_documents, score_documents
from deltazoo.training.data import Document
from deltazoo.training.tokens import build_tokenizer

TEXTS = ["a", "def f(x):\n    return x\n", "ünïcödé 語 🙂 " * 9, "x" * 150, "the end"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16, "initializer_range": 0.3}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(TokenizerConfig(kind="byte"), [])


@pytest.fixture(scope="module", params=["gated_deltanet", "hybrid", "llama"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    if request.param == "llama":
        heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
        return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=258, **heads))
    extra = HYBRID if request.param == "hybrid" else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gated_deltanet", vocab_size=258, **SIZES, **extra))


@torch.no_grad()
def slow_nats(model: PreTrainedModel, text: str) -> float:
    """One document alone in one forward pass: BOS, then its bytes."""
    ids = torch.tensor([[0, *(_BYTE_IDS[byte] for byte in text.encode())]])
    return float(F.cross_entropy(model.eval()(input_ids=ids).logits[0, :-1].double(), ids[0, 1:], reduction="sum"))


@pytest.fixture(scope="module", autouse=True)
def byte_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    # Single bytes above 127 are not UTF-8 text; the byte-level alphabet has symbols for them.
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = tokenizer.get_vocab()
    _BYTE_IDS.update({byte: vocabulary[symbol] for byte, symbol in bytes_to_unicode().items()})


_BYTE_IDS: dict[int, int] = {}


@pytest.mark.parametrize("tokens_at_once", [7, 64, 8192])
def test_the_score_is_that_of_each_document_alone(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens_at_once: int
) -> None:
    documents = [Document(str(i), text, "") for i, text in enumerate(TEXTS)]
    score = score_documents(model, tokenizer, documents, tokens_at_once=tokens_at_once)
    expected = sum(slow_nats(model, text) for text in TEXTS)
    size = len("".join(TEXTS).encode())
    assert score.nats == pytest.approx(expected, rel=1e-5)
    assert (score.bytes, score.tokens, score.documents) == (size, size, len(TEXTS))
    assert score.bits_per_byte == pytest.approx(expected / math.log(2) / size, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(expected / size), rel=1e-5)


@pytest.mark.parametrize("tokens_at_once", [7, 8192])
def test_rows_are_no_longer_than_a_models_learned_positions(
    tokenizer: PreTrainedTokenizerBase, tokens_at_once: int
) -> None:
    torch.manual_seed(0)
    sizes = {"n_positions": 20, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", vocab_size=258, **sizes)).eval()
    score = score_documents(model, tokenizer, [Document("a", "x" * 50, "")], tokens_at_once=tokens_at_once)
    ids = torch.tensor([[0] + [_BYTE_IDS[ord("x")]] * 50])
    expected = 0.0
    size = min(tokens_at_once, 20)
    for first in range(0, 50, size):
        targets = ids[0, first + 1 : first + 1 + size]
        logits = model(ids[:, first : first + len(targets)]).logits[0].detach().double()
        expected += float(F.cross_entropy(logits, targets, reduction="sum"))
    assert score.nats == pytest.approx(expected, rel=1e-5)
    assert score.tokens == 50


@pytest.mark.parametrize("tokens_at_once", [7, 8192])
@pytest.mark.parametrize("where", ["lm_head", "layers.1.mlp.down_proj"])
def test_a_model_that_computes_nan_has_no_score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, where: str, tokens_at_once: int
) -> None:
    broken = copy.deepcopy(model)
    (module,) = (module for name, module in broken.named_modules() if name.endswith(where))
    module.weight.data[7, 3] = math.nan
    documents = [Document(str(i), text, "") for i, text in enumerate(TEXTS)]
    found = f"computed nan as the negative log-likelihood .*; NaN comes first in the output of .*{where}, whose weight"
    with pytest.raises(FloatingPointError, match=found):
        score_documents(broken, tokenizer, documents, tokens_at_once=tokens_at_once)


def test_a_token_without_any_probability_has_no_score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_a(self: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.weight).index_fill(-1, torch.tensor(_BYTE_IDS[ord("a")]), -math.inf)

    monkeypatch.setattr(model.lm_head, "forward", never_a.__get__(model.lm_head))
    assert math.isfinite(score_documents(model, tokenizer, [Document("0", "bcd", "")]).nats)
    with pytest.raises(FloatingPointError, match="computed inf as the negative log-likelihood of a text, so it has no"):
        score_documents(model, tokenizer, [Document("0", "bad", "")])


def test_only_models_that_restart_their_state_are_given_packed_documents(model: PreTrainedModel) -> None:
    assert packs_documents(model) == (model.config.model_type != "llama")


def test_scoring_leaves_the_mode_of_the_model_alone(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    model.train()
    score_documents(model, tokenizer, [Document("a", "abc", "")])
    assert model.training


def test_a_vocabulary_that_does_not_fit_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    small = AutoModelForCausalLM.from_config(AutoConfig.for_model("gated_deltanet", vocab_size=257, **SIZES))
    with pytest.raises(ValueError, match="tokenizer has 258 entries, the checkpoint's vocabulary only 257"):
        score_documents(small, tokenizer, [Document("a", "abc", "")])


def test_nothing_to_score_is_refused(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="no document to score"):
        score_documents(model, tokenizer, [])
