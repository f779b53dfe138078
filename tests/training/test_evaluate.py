"""Scores: every byte of a document counts, however documents are packed or cut; compressors; single swapped layers."""

from __future__ import annotations

import copy
import gzip
import json
import lzma
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import deltazoo.models  # noqa: F401
from deltazoo.cli.swapping import ranking_table
from deltazoo.swap import swap_attention
from deltazoo.training.config import TokenizerConfig
from deltazoo.training.evaluate import Ranking, baselines, packs_documents, rank_layers, score_documents, score_rows
from deltazoo.training.tokens import Row, build_tokenizer, collate_side_by_side, pack_in_order

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
    score = score_documents(model, tokenizer, TEXTS, tokens_at_once=tokens_at_once)
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
    score = score_documents(model, tokenizer, ["x" * 50], tokens_at_once=tokens_at_once)
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
    found = f"computed nan as the negative log-likelihood .*; NaN comes first in the output of .*{where}, whose weight"
    with pytest.raises(FloatingPointError, match=found):
        score_documents(broken, tokenizer, TEXTS, tokens_at_once=tokens_at_once)


def test_a_token_without_any_probability_has_no_score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_a(self: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.weight).index_fill(-1, torch.tensor(_BYTE_IDS[ord("a")]), -math.inf)

    monkeypatch.setattr(model.lm_head, "forward", never_a.__get__(model.lm_head))
    assert math.isfinite(score_documents(model, tokenizer, ["bcd"]).nats)
    with pytest.raises(FloatingPointError, match="computed inf as the negative log-likelihood of a text, so it has no"):
        score_documents(model, tokenizer, ["bad"])


def test_only_models_that_restart_their_state_are_given_packed_documents(model: PreTrainedModel) -> None:
    assert packs_documents(model) == (model.config.model_type != "llama")


def test_scoring_leaves_the_mode_of_the_model_alone(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    model.train()
    score_documents(model, tokenizer, ["abc"])
    assert model.training


def test_a_vocabulary_that_does_not_fit_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    small = AutoModelForCausalLM.from_config(AutoConfig.for_model("gated_deltanet", vocab_size=257, **SIZES))
    with pytest.raises(ValueError, match="tokenizer has 258 entries, the checkpoint's vocabulary only 257"):
        score_documents(small, tokenizer, ["abc"])


def test_nothing_to_score_is_refused(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="no document to score"):
        score_documents(model, tokenizer, [])


def decoded(*texts: bytes) -> list[str]:
    return [text.decode("latin-1") for text in texts]


def test_the_baselines_are_gzip_9_and_xz_9() -> None:
    held_out = decoded(random.Random(0).randbytes(300), b"the cat sat on the mat. " * 9)
    data = "".join(held_out).encode()
    found = {baseline.name: baseline for baseline in baselines([], held_out, primed=True)}
    assert list(found) == ["gzip -9", "xz -9"], "there is no text to prime with"
    assert found["gzip -9"].bits_per_byte == 8 * len(gzip.compress(data, 9, mtime=0)) / len(data)
    assert found["xz -9"].bits_per_byte == 8 * len(lzma.compress(data, preset=9)) / len(data)


def test_a_primed_compressor_pays_only_for_what_is_new() -> None:
    text = decoded(random.Random(1).randbytes(100_000))
    found = {baseline.name: baseline for baseline in baselines(text, text, primed=True)}
    assert found["xz -9"].bits_per_byte > 5
    assert found["xz -9, primed"].bits_per_byte < 0.1
    assert found["xz -9, primed"].has_seen == "the training text"
    assert len(baselines(text, text)) == 2


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, initializer_range=0.3, **sizes)).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()  # a layer without effect
    return model


def rows() -> list[Row]:
    generator = np.random.default_rng(0)
    return pack_in_order([generator.integers(0, 50, 40) for _ in range(4)], 32)


def test_the_rise_is_that_of_the_layer_swapped_alone() -> None:
    model = llama()
    ranking = rank_layers(model, "delta_net", rows())
    assert len(ranking.losses) == 3
    assert ranking.losses[1] == ranking.loss
    alone = copy.deepcopy(model)
    swap_attention(alone, "delta_net", layers=[2])
    nats, tokens = score_rows(alone, rows(), 8, collate_side_by_side)
    assert ranking.losses[2] == nats / tokens != ranking.loss


def test_the_ranked_model_is_left_as_it_was() -> None:
    model = llama()
    before, ids = copy.deepcopy(model), torch.arange(20)[None]
    rank_layers(model, "kda", rows())
    assert type(model) is LlamaForCausalLM
    assert type(model.config) is LlamaConfig
    assert torch.equal(model(input_ids=ids).logits, before(input_ids=ids).logits)


def ranking(*rises: float) -> Ranking:
    return Ranking("kda", 1.0, 10, tuple(1.0 + rise for rise in rises))


def test_the_best_are_those_least_missed() -> None:
    found = ranking(0.3, 0.1, math.nan, -0.1, 0.2)
    assert found.best(1) == [3]
    assert found.best(3) == [1, 3, 4]
    assert found.best(4) == [0, 1, 3, 4], "NaN comes last"


def test_a_ranking_with_nan_is_shown_and_kept(tmp_path: Path) -> None:
    """NaN comes last in the table, too, and in JSON it is null."""
    found = ranking(0.5, math.nan, -0.25, 0.25)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(ranking_table(found))
    assert [x for x in captured.get().split() if x[0] in "+-"] == ["-0.2500", "+0.2500", "+0.5000", "+nan"]
    found.save(tmp_path / "ranking.json")
    kept = json.loads((tmp_path / "ranking.json").read_text(), parse_constant=pytest.fail)
    assert kept == {
        "rule": "kda",
        "loss": 1.0,
        "tokens": 10,
        "layers": [
            {"layer": 0, "loss": 1.5, "rise": 0.5},
            {"layer": 1, "loss": None, "rise": None},
            {"layer": 2, "loss": 0.75, "rise": -0.25},
            {"layer": 3, "loss": 1.25, "rise": 0.25},
        ],
    }


def test_a_model_of_nan_has_no_ranking() -> None:
    model = llama()
    model.lm_head.weight.data[7] = math.nan
    with pytest.raises(FloatingPointError, match="original model's loss on this text is nan"):
        rank_layers(model, "kda", rows())


def test_a_ranking_needs_text() -> None:
    with pytest.raises(ValueError, match="no text"):
        rank_layers(llama(), "kda", [])
