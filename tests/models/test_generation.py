"""Transformers' own loop makes, token for token in float32, what forward passes without a cache make."""

from functools import partial

import pytest
import torch
from decoding_loops import ACCELERATED, PADDED, SWAPPED, assert_decodes_like_forward, model_of, uncaptured
from tiny_families import OWN
from tiny_models import CASES, FEW, TYPES, tiny_model, tiny_named, tokens
from tiny_serving import byte_tokenizer, tiny
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

GREEDY = {"max_new_tokens": 8, "do_sample": False}


def greedy_loop(model, ids, new_tokens):
    """The definition of greedy decoding."""
    for _ in range(new_tokens):
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


def from_embeddings(model, ids, mask, count):
    embeddings = {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": mask}
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": -1, "capture_step": False}
    return torch.cat([ids, model.generate(**embeddings, max_new_tokens=count, **options)], dim=1)


WAYS = {
    "dynamic": uncaptured,
    "static": partial(uncaptured, cache_implementation="static", disable_compile=True),
    "pieces": partial(uncaptured, prefill_chunk_size=4),
    "embeddings": from_embeddings,
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, "dynamic") for kind in (*CASES, *(f"{x} 1:1" for x in OWN), "llama all", "gemma3_text all")),
        *((kind, "static") for kind in (*FEW, "softmax_only", *SWAPPED, *ACCELERATED)),
        *((kind, "static") for kind in ("gemma2 1:1", "gpt_neox 1:1", "mistral all", "gpt2 all")),
        *((kind, way) for kind in FEW for way in ("pieces", "embeddings")),
        *((kind, "dynamic") for kind in ACCELERATED),
    ],
)
def test_tokens_are_those_of_the_forward_pass(kind, way):
    """Rows without padding and with it, each as if it were alone; a later call may find the cache of the one before."""
    model = model_of(kind)
    for mask in (None, PADDED, None) if way == "static" else (None, PADDED):
        assert_decodes_like_forward(model, WAYS[way], mask=mask)


@pytest.mark.parametrize("model_type", TYPES)
def test_every_type(model_type):
    assert_decodes_like_forward(tiny_named(model_type), uncaptured)


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"do_sample": True, "top_k": 20}, id="sample"),
        pytest.param({"do_sample": True, "num_return_sequences": 2}, id="samples_returned"),
        pytest.param({"do_sample": False, "num_beams": 3}, id="beam"),
        pytest.param(
            {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
            id="beams_returned",
        ),
        pytest.param({"do_sample": True, "num_beams": 2}, id="beam_sample"),
    ],
)
def test_cache_changes_nothing(case, options):
    model, ids = tiny_model(case), tokens(2, 6)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        results.append(model.generate(ids, max_new_tokens=8, use_cache=use_cache, **options))
    assert torch.equal(*results)


@pytest.mark.parametrize("case", CASES)
def test_any_partition_of_the_tokens_equals_one_call(case):
    model, ids = tiny_model(case).double(), tokens(2, 23)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache, logits = None, []
        for part in ids.split([6, 1, 2, 9, 1, 4], dim=1):
            output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
    assert cache.get_seq_length() == 23
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize("length", [1, 2, 30])
def test_second_turn_continues_the_returned_cache(case, length):
    model, ids = tiny_model(case), tokens(2, 5)
    first = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    conversation = torch.cat([first.sequences, tokens(2, length, seed=7)], dim=1)
    second = model.generate(conversation, past_key_values=first.past_key_values, max_new_tokens=4, do_sample=False)
    assert torch.equal(second, greedy_loop(model, conversation, 4))


@pytest.mark.parametrize("held", [6, 7])
def test_a_cache_of_the_whole_prompt_is_refused(held):
    """transformers would run the prompt once more behind itself."""
    model, ids = tiny_model("gated_deltanet"), tokens(2, 7)
    cache = model(ids[:, :held]).past_key_values
    with pytest.raises(ValueError, match=f"the cache holds {held} tokens, and the prompt has 6"):
        model.generate(ids[:, :6], max_new_tokens=5, past_key_values=cache)
    cache = model(ids[:, :5]).past_key_values
    generated = model.generate(ids[:, :6], max_new_tokens=5, do_sample=False, past_key_values=cache)
    assert torch.equal(generated, greedy_loop(model, ids[:, :6], 5))


@pytest.mark.parametrize("case", FEW)
def test_new_tokens_alone_beside_a_cache_of_those_before(case):
    """As transformers has it: the mask is that of all tokens."""
    model, ids = tiny_model(case), tokens(2, 10)
    options = {"past_key_values": model(ids[:, :7]).past_key_values, "attention_mask": torch.ones(2, 10)}
    generated = model.generate(ids[:, 7:], max_new_tokens=5, do_sample=False, **options)
    assert torch.equal(generated[:, 3:], greedy_loop(model, ids, 5)[:, 10:])


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"capture_step": True}], ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("overrides", [{"case": "gated_deltanet"}, {"case": "hybrid", "head_dim": 6}], ids=str)
def test_prefill_of_padded_prompts_in_chunks(overrides, chunk, options):
    """transformers takes a piece of one token for a decoding step, and static caches for softmax layers alone."""
    model, ids = tiny_model(**overrides), tokens(2, 7)
    mask = torch.tensor([[1] * 7, [0] * 4 + [1] * 3])
    options = {"max_new_tokens": 5, "attention_mask": mask, "pad_token_id": 0, "disable_compile": True, **options}
    expected = model.generate(ids, max_new_tokens=5, attention_mask=mask, pad_token_id=0, use_cache=False)
    assert torch.equal(model.generate(ids, prefill_chunk_size=chunk, **options), expected)


@pytest.mark.parametrize("case", ["gated_deltanet"])
def test_streaming_hands_out_every_token_once(case):
    class Collector(BaseStreamer):
        def __init__(self):
            self.tokens = []
            self.ended = False

        def put(self, value):
            self.tokens.extend(value.flatten().tolist())

        def end(self):
            self.ended = True

    model, ids, streamer = tiny_model(case), tokens(1, 6), Collector()
    generated = model.generate(ids, max_new_tokens=6, do_sample=False, streamer=streamer)
    assert streamer.ended
    assert streamer.tokens == generated[0].tolist()


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4]), torch.tensor([[0, 2], [5, 1]])], ids=str)
@pytest.mark.parametrize("case", ["hybrid"])
def test_logits_to_keep(case, keep):
    model, ids = tiny_model(case), tokens(2, 6)
    with torch.no_grad():
        logits, kept = model(ids).logits, model(ids, logits_to_keep=keep).logits
    if isinstance(keep, int):
        expected = logits[:, -keep:]
    else:
        rows = keep.expand(2, -1)
        expected = torch.stack([logits[i, rows[i]] for i in range(2)])
    torch.testing.assert_close(kept, expected)


@pytest.mark.parametrize("case", ["hybrid"])
def test_logits_to_keep_as_a_mask(case):
    model, ids = tiny_model(case), tokens(2, 6)
    mask = tokens(2, 6, seed=2) % 2 == 0
    with torch.no_grad():
        torch.testing.assert_close(model(ids, logits_to_keep=mask).logits, model(ids).logits[mask])


@pytest.mark.parametrize("case", ["gated_deltanet", "hybrid"])
def test_beams_in_a_static_cache(case):
    model, ids = tiny_model(case), tokens(2, 6)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), model.generate(ids, **options))


@pytest.mark.parametrize("case", ["gated_deltanet", "hybrid", "hybrid_softmax_first"])
class TestFewerLayers:
    """As in transformers' own models, `num_hidden_layers` is the number of layers that run."""

    def test_loaded(self, case, tmp_path):
        model, ids = tiny_model(case), tokens(2, 5)
        model.save_pretrained(tmp_path / "both")
        first = AutoModelForCausalLM.from_pretrained(tmp_path / "both", num_hidden_layers=1)
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
        assert torch.equal(first(ids).logits, model(ids).logits)
        assert torch.equal(first.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
        assert first.config.layer_types == model.config.layer_types[:1]


@pytest.mark.parametrize("capture_step", [None, True])
def test_stop_strings(capture_step):
    """transformers hands the tokenizer, by which it finds them, on to the model's forward pass."""
    model, ids, tokenizer = tiny(), tokens(1, 7), byte_tokenizer()
    whole = model.generate(ids, max_new_tokens=60, do_sample=False)[0, 7:]
    letter = next(place for place, token in enumerate(whole[20:].tolist(), 20) if tokenizer.decode([token]).isalnum())
    stop = tokenizer.decode(whole[letter : letter + 1])
    first = next(place for place, token in enumerate(whole.tolist()) if tokenizer.decode([token]) == stop)
    made = model.generate(
        ids, max_new_tokens=60, do_sample=False, stop_strings=[stop], tokenizer=tokenizer, capture_step=capture_step
    )
    assert made.shape[1] == 7 + first + 1
