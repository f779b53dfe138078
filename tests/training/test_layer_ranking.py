"""The ranking of layers: one layer at a time, the model unchanged afterwards, the smallest rise in loss first."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from deltazoo.cli.training import ranking_table
from deltazoo.swap import swap_attention
from deltazoo.training.layer_ranking import LayerScore, Ranking, rank_layers
from deltazoo.training.tokens import collate_side_by_side, pack_in_order
from deltazoo.training.pictures import draw_ranking
from deltazoo.training.validation_loss import score_rows


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, initializer_range=0.3, **sizes)).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()  # a layer without effect
    return model


def rows() -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    return pack_in_order([generator.integers(0, 50, 40) for _ in range(4)], 32)


def test_the_rise_is_that_of_the_layer_swapped_alone() -> None:
    model = llama()
    ranking = rank_layers(model, "delta_net", rows())
    assert [score.layer for score in ranking.layers] == [0, 1, 2]
    assert ranking.layers[1].rise == 0
    alone = copy.deepcopy(model)
    swap_attention(alone, "delta_net", layers=[2])
    nats, tokens = score_rows(alone, rows(), 8, collate_side_by_side)
    assert ranking.layers[2].loss == nats / tokens
    assert ranking.layers[2].rise == nats / tokens - ranking.loss != 0


def test_the_model_is_left_as_it_was() -> None:
    model = llama()
    before, ids = copy.deepcopy(model), torch.arange(20)[None]
    rank_layers(model, "kda", rows())
    assert type(model) is LlamaForCausalLM
    assert type(model.config) is LlamaConfig
    assert torch.equal(model(input_ids=ids).logits, before(input_ids=ids).logits)


def ranking(*rises: float) -> Ranking:
    return Ranking("kda", 1.0, 10, tuple(LayerScore(i, 1.0 + rise, rise) for i, rise in enumerate(rises)))


def test_the_best_are_those_least_missed() -> None:
    found = ranking(0.3, 0.1, math.nan, -0.1, 0.2)
    assert found.best(1) == [3]
    assert found.best(3) == [1, 3, 4]
    assert found.best(4) == [0, 1, 3, 4], "NaN comes last"


def test_a_ranking_with_nan_is_shown_and_kept(tmp_path: Path) -> None:
    """NaN comes last in the table, too, and in JSON it is null."""
    found = ranking(0.3, math.nan, -0.1, 0.2)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(ranking_table(found))
    assert [x for x in captured.get().split() if x in ["+0.3000", "+nan", "-0.1000", "+0.2000"]] == [
        *("-0.1000", "+0.2000", "+0.3000", "+nan")
    ]
    found.save(tmp_path / "ranking.json")
    kept = json.loads((tmp_path / "ranking.json").read_text(), parse_constant=pytest.fail)
    assert [layer["rise"] for layer in kept["layers"]] == [0.3, None, -0.1, 0.2]


def test_a_model_of_nan_has_no_ranking() -> None:
    model = llama()
    model.lm_head.weight.data[7] = math.nan
    with pytest.raises(FloatingPointError, match="original model's loss on this text is nan"):
        rank_layers(model, "kda", rows())


@pytest.mark.parametrize("count", [0, 3])
def test_there_are_only_so_many_layers(count: int) -> None:
    with pytest.raises(ValueError, match=f"best:{count} asks for {count} of 2 layers"):
        ranking(0.1, 0.2).best(count)


def test_a_ranking_needs_text() -> None:
    with pytest.raises(ValueError, match="no text"):
        rank_layers(llama(), "kda", [])


def test_a_ranking_is_drawn(tmp_path: Path) -> None:
    assert draw_ranking(tmp_path / "a.png", ranking(0.1, -0.2), [1]).read_bytes().startswith(b"\x89PNG")
