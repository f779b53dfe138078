"""A model that computes NaN generates nothing: an error says which row, and in which module NaN comes first."""

import pytest
import torch
from decoding_loops import ACCELERATED, DEVICES, model_of
from tiny_models import VOCAB, tiny_model, tokens

import deltazoo
from deltazoo.generation import Decoder, Sampling
from deltazoo.generation.conditions import origin_of_nan, watch_for_nan

KINDS = ["kda", "hybrid", "llama 1:1", *ACCELERATED[:1]]
WAYS = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}]
NAN = float("nan")


def unused_in(made):
    return next(token for token in range(2, VOCAB) if token not in made)


def broken(model, where, token=5):
    """The model with NaN in one weight, and the name of that weight's module."""
    if where == "head":
        module = model.get_output_embeddings()
        module.weight.data[7] = NAN
    elif where == "embedding":
        module = model.get_input_embeddings()
        module.weight.data[token] = NAN
    else:
        module = [x for name, x in model.named_modules() if name.endswith(("o_proj", "out_proj"))][1]
        module.weight.data[3, 2] = NAN
    return next(name for name, x in model.named_modules() if x is module)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "where", "way"), [*(("hybrid", "head", x) for x in WAYS), *((x, "layer", {}) for x in KINDS)]
)
def test_no_token_comes_of_nan(kind, where, way, device):
    model = model_of(kind)
    ids, name = tokens(2, 6), broken(model, where)
    found = rf"logits for new token 1 of row 0; NaN comes first in the output of {name}, whose weight holds NaN$"
    with pytest.raises(FloatingPointError, match=found):
        deltazoo.generate(model.to(device), ids.to(device), max_new_tokens=4, **way)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", ["kda", "llama 1:1"])
def test_the_row_and_the_token_are_named(kind, way, device):
    """The second row makes a token whose embedding is NaN; on a GPU the step behind NaN has begun."""
    model = model_of(kind).to(device)
    ids, options = tokens(2, 6).to(device), {"max_new_tokens": 9, "eos_token_id": [], **way}
    made = deltazoo.generate(model, ids, **options)[:, ids.shape[1] :]
    others = {*ids.flatten().tolist(), *made[0].tolist()}
    place = next(i for i in range(7) if made[1, i].item() not in {*others, *made[1, :i].tolist()})
    model.get_input_embeddings().weight.data[made[1, place]] = NAN
    decoder, received = Decoder(model, 2, max_length=20, sampling=Sampling(**way), eos_token_id=[]), []
    with pytest.raises(FloatingPointError, match=rf"new token {place + 2} of row 1; NaN comes first in .*embed"):
        received.extend(decoder.stream(ids, max_new_tokens=9))
    assert torch.equal(torch.stack(received, dim=1), made[:, : place + 1].cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["kda", "hybrid"])
def test_rows_that_have_ended_may_compute_nan(kind, device):
    """The first row ends, and is fed a padding token whose embedding is NaN."""
    model = model_of(kind).to(device)
    ids = tokens(2, 6).to(device)
    made = deltazoo.generate(model, ids, max_new_tokens=6, eos_token_id=[])
    end = next(token for token in made[0, 6:9].tolist() if token not in made[1])
    first = made[0, 6:].tolist()[: made[0, 6:].tolist().index(end) + 1]
    pad = unused_in(made)
    broken(model, "embedding", pad)
    again = deltazoo.generate(model, ids, max_new_tokens=6, eos_token_id=end, pad_token_id=pad)
    assert torch.equal(again[1], made[1]) and again[0, 6:].tolist() == [*first, *[pad] * (6 - len(first))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_goes_on_with_another_prompt(kind, device):
    """NaN in a cache is forgotten with the prompt that brought it, and a captured step stays good."""
    model = model_of(kind).to(device)
    ids = tokens(2, 6).to(device)
    expected = deltazoo.generate(model, ids, max_new_tokens=6, eos_token_id=[])
    bad, token = ids.clone(), unused_in(expected)
    bad[1, 4] = token
    broken(model, "embedding", token)
    decoder = Decoder(model, 2, max_length=20, eos_token_id=[])
    mask = torch.ones_like(bad)
    mask[1, :3] = 0
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="new token 1 of row 1; NaN comes first in the output of .*embed"):
            list(decoder.stream(bad, mask, max_new_tokens=6))
        assert torch.equal(torch.stack(list(decoder.stream(ids, max_new_tokens=6)), 1), expected[:, 6:].cpu())


@pytest.mark.parametrize("kind", ["hybrid", *KINDS[3:]])
def test_a_captured_step_carries_it(kind, replays):
    model = model_of(kind)
    ids = tokens(2, 6)
    made = deltazoo.generate(model, ids, max_new_tokens=3, eos_token_id=[])
    decoder = Decoder(model, 2, max_length=20, eos_token_id=[])
    assert torch.equal(torch.stack(list(decoder.stream(ids, max_new_tokens=3)), 1), made[:, 6:])
    broken(model, "head")  # in place: the graph reads the weights anew
    decoder._advance(first=False)
    assert decoder.token.tolist() == [[-1], [-1]]
    decoder._advance(first=False)  # behind them
    assert decoder.token.tolist() == [[-1], [-1]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"capture_step": True}, {"capture_step": False}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize(("kind", "where"), [("hybrid", "head"), ("kda", "layer"), *((x, "layer") for x in KINDS[3:])])
def test_transformers_loop(kind, where, options, device):
    """Its likeliest token of NaN is the first NaN; only the end of a call can tell."""
    model = model_of(kind).to(device)
    ids, options = tokens(2, 6).to(device), {"max_new_tokens": 4, "do_sample": False, **options}
    model.generate(ids, **options)
    broken(model, where)
    with pytest.raises(FloatingPointError, match="computed NaN in the logits of row 0, so the tokens mean nothing"):
        model.generate(ids, **options)
    with pytest.raises(FloatingPointError, match="computed NaN in the logits of row 0"):
        model.generate(ids, **options | {"max_new_tokens": 1})
    assert model.generate(ids, **options, remove_invalid_values=True).shape == (2, 10)


def test_transformers_loop_names_the_row():
    model = tiny_model("kda")
    broken(model, "embedding")
    ids = tokens(2, 6)
    ids[1, 2] = 5  # no other token is
    with pytest.raises(FloatingPointError, match="logits of row 1"):
        model.generate(ids, max_new_tokens=4, do_sample=False)


def test_infinity_is_named_and_hidden_tokens_are_not():
    model = tiny_model("hybrid")
    model.model.layers[1].mlp.down_proj.weight.data[0] = torch.inf
    found = origin_of_nan(model, tokens(2, 6))
    assert found.startswith(("; infinity comes first", "; NaN comes first"))
    assert found.endswith("in the output of model.layers.1.mlp.down_proj, whose weight holds infinity")
    hidden = torch.nn.Threshold(0.0, -torch.inf)
    with watch_for_nan(hidden) as nothing:
        assert hidden(torch.tensor([-1.0, 1.0])).isinf().any()
    assert not nothing and not hidden._forward_hooks


def test_a_pass_that_fails_names_no_place():
    model = tiny_model("kda")
    assert origin_of_nan(model, tokens(2, 6)) == origin_of_nan(model, torch.full((1, 4), 10**6)) == ""
