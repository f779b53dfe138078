"""Which models have learned positions, and how many tokens they take."""

import pytest
import torch
from tiny_families import swapped, tiny_original, tokens
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

import deltazoo
from deltazoo.generation.conditions import check_positions, learned_positions


def opt():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 32, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("opt", **sizes, word_embed_proj_dim=32, max_position_embeddings=24, vocab_size=61)
    )


@pytest.mark.parametrize("swap", [False, True])
def test_gpt2_has_learned_positions(swap):
    model = tiny_original("gpt2", max_position_embeddings=24)
    if swap:
        deltazoo.swap_attention(model, "kda")
    assert learned_positions(model) == 24
    check_positions(model, 24, "rows")
    with pytest.raises(ValueError, match=r"^rows exceed the 24 learned positions of \w*GPT2LMHeadModel$"):
        check_positions(model, 25, "rows")


def test_opt_has_two_rows_of_its_table_for_padding():
    model = opt()
    assert learned_positions(model) == 24
    assert model(tokens(1, 24)).logits.isfinite().all()
    with pytest.raises(IndexError):
        model(tokens(1, 25))


def test_others_have_none():
    for model in (tiny_original("llama"), tiny_model("hybrid"), tiny_model("kda")):
        assert learned_positions(model) is None
        check_positions(model, 10**9, "rows")


def test_a_decoder_refuses_more_tokens_than_positions():
    model = swapped("gpt2", [0], "kda", sizes={"max_position_embeddings": 24})
    assert deltazoo.generate(model, tokens(1, 14), max_new_tokens=10, eos_token_id=[]).shape == (1, 24)
    with pytest.raises(ValueError, match="^14 prompt tokens and 11 new ones exceed the 24 learned positions of"):
        deltazoo.generate(model, tokens(1, 14), max_new_tokens=11)
    padded = torch.tensor([[0] * 4 + [1] * 10])  # padding takes no position
    assert deltazoo.generate(model, tokens(1, 14), padded, max_new_tokens=14, eos_token_id=[]).shape == (1, 28)
