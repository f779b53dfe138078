"""A swapped model runs, decodes and reloads, for every family, several choices of layers and several rules."""

import copy

import pytest
import torch
from tiny_families import CHOICES, NUM_LAYERS, OWN, tiny_original, tokens
from transformers import AutoModelForCausalLM

import deltazoo
from deltazoo.swap import FAMILIES, swapped_layers

RULES = ["delta_net", "gated_deltanet", "kda", "efla"]
PAIRS = [
    (family, list(CHOICES)[(number + turn) % len(CHOICES)], rule)
    for number, family in enumerate(OWN)
    for turn, rule in enumerate(RULES)
]
"""Every family with every rule and every choice of layers, and every rule with every choice."""


@torch.no_grad()
def stepwise(model, ids, prefill=5):
    """Logits of a prefill and of single steps after it."""
    out = model(ids[:, :prefill], use_cache=True)
    logits = [out.logits]
    for token in ids[:, prefill:].split(1, dim=1):
        out = model(token, past_key_values=out.past_key_values)
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def test_every_family_of_the_table_is_tested():
    assert set(OWN) == set(FAMILIES)


@pytest.mark.parametrize(("family", "choice", "rule"), PAIRS)
def test_runs_decodes_and_reloads(family, choice, rule, tmp_path):
    original, ids = tiny_original(family), tokens(2, 7)
    model = copy.deepcopy(original)
    report = deltazoo.swap_attention(model, rule, CHOICES[choice])
    assert len(swapped_layers(model)) == len(report.layers) == {"one": 1, "half": 2, "all": NUM_LAYERS}[choice]

    with torch.no_grad():
        logits = model(ids).logits
        assert logits.isfinite().all()
        assert not torch.allclose(logits, original(ids).logits, atol=1e-3)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, logits)

    model.double()
    with torch.no_grad():
        logits = model(ids).logits
    torch.testing.assert_close(stepwise(model, ids), logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "gpt2"])
def test_hidden_states_and_attentions_of_the_layers_that_have_them(family):
    model, ids = tiny_original(family), tokens(2, 6)
    deltazoo.swap_attention(model, "delta_net", [1])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == NUM_LAYERS + 1
    assert len(out.attentions) == NUM_LAYERS - 1
