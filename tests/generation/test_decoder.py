"""`deltazoo.generate` and `model.generate` give the tokens of the forward pass, for every kind of model."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from decoding_loops import ACCELERATED, DEVICES, PADDED, SWAPPED, assert_decodes_like_forward, model_of, ordinary, own
from foreign_models import foreign_model
from peft import LoraConfig, get_peft_model
from tiny_families import tiny_original
from tiny_models import STATES, tiny_model, tokens
from transformers.generation.streamers import BaseStreamer

import deltazoo
from deltazoo.generation import Decoder, Sampling


def plain(model, ids, max_new_tokens=9, **options):
    return model.generate(ids, capture_step=False, max_new_tokens=max_new_tokens, do_sample=False, **options)


def streamed(decoder, model, ids, mask, count):
    return torch.cat([ids.cpu(), torch.stack(list(decoder.stream(ids, mask, max_new_tokens=count)), dim=1)], dim=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*STATES, *SWAPPED, *ACCELERATED])
def test_tokens_are_the_likeliest(kind, device, request):
    """Of every kind of model, for prompts whole and in pieces, with padding and without, in both loops.

    One captured step serves the calls of `model.generate`.
    """
    captures = request.getfixturevalue("captures") if device == "cpu" else [own] * 3
    model = model_of(kind).to(device)
    assert_decodes_like_forward(model, own)
    assert_decodes_like_forward(model, partial(own, prefill_chunk=3), mask=PADDED)
    for mask in (None, PADDED, None):
        assert_decodes_like_forward(model, ordinary, mask=mask)
    assert len(captures) == 3
    decoding = deltazoo.report(model).decoding
    assert "captures its step in a CUDA graph" in decoding and "(the last call: captured)" in decoding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefill_chunk", [1, 50])
@pytest.mark.parametrize("kind", ["hybrid", "kda_without_conv", "gemma3_text 1:1"])
def test_pieces_and_padding_of_all_lengths(kind, prefill_chunk, device):
    mask = torch.tensor([[1] * 7, [0] * 4 + [1] * 3, [0] * 6 + [1]])
    assert_decodes_like_forward(
        model_of(kind).to(device), partial(own, prefill_chunk=prefill_chunk), tokens(3, 7), mask=mask
    )


@pytest.mark.parametrize("device", DEVICES)
def test_rows_end_one_by_one(device):
    """And all at the end of the last one."""
    model, ids = tiny_model("hybrid").to(device), tokens(4, 5).to(device)
    ends = plain(model, ids)[:2, 7].tolist()  # the third new tokens of two rows
    options = {"eos_token_id": ends, "pad_token_id": 60}
    made = deltazoo.generate(model, ids, max_new_tokens=9, **options)
    # Without a mask transformers would take the prompt's own tokens 60 for padding.
    assert torch.equal(made, plain(model, ids, attention_mask=torch.ones_like(ids), **options))
    assert (made[:, 5:] == 60).any()
    alone = deltazoo.generate(model, ids[:1], max_new_tokens=9, eos_token_id=ends[0])
    assert torch.equal(alone, plain(model, ids[:1])[:, :8])


def test_rows_that_ended_go_on_in_the_next_stream(captures):
    """Nor does a row end by what is tried at a capture: the end is the second token, of the first step."""
    model, ids = tiny_model("gated_deltanet"), tokens(2, 5)
    ends = {"eos_token_id": plain(model, ids)[0, 6].item(), "pad_token_id": 60}
    expected = plain(model, ids, attention_mask=torch.ones_like(ids), **ends)
    decoder = Decoder(model, 2, **ends)
    for _ in range(2):
        assert torch.equal(streamed(decoder, model, ids, None, 9), expected)
    assert len(captures) == 1 and (expected[0, 7:] == 60).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["hybrid", "gated_deltanet"])
def test_a_decoder_serves_one_prompt_after_another(case, device):
    model = tiny_model(case).to(device)
    decoder = Decoder(model, 2, max_length=30, eos_token_id=[])
    for seed, length in enumerate((7, 1, 12)):
        assert_decodes_like_forward(model, partial(streamed, decoder), tokens(2, length, seed=seed))


@pytest.mark.parametrize("kind", ["hybrid", "llama 1:1", ACCELERATED[0]])
def test_weights_that_moved_are_captured_anew(kind, captures):
    model = model_of(kind)
    decoder = Decoder(model, 2, max_length=20, eos_token_id=[])
    for number, assign in enumerate((False, False, True, False)):
        assert_decodes_like_forward(model, partial(streamed, decoder))
        assert len(captures) == 1 + (number == 3)
        model.load_state_dict({key: 1.1 * x for key, x in model.state_dict().items()}, assign=assign)


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_hooks_between_streams_are_seen(how, replays):
    """A graph captured before would go on without them."""
    model = tiny_model("hybrid")
    decoder, norm = Decoder(model, 2, max_length=20, eos_token_id=[]), model.model.norm
    assert_decodes_like_forward(model, partial(streamed, decoder))
    if how == "hook":
        norm.register_forward_hook(lambda module, args, output: output.flip(-1))
    else:
        norm.forward = lambda x: x.flip(-1)
    assert_decodes_like_forward(model, partial(streamed, decoder))


def test_the_streams_of_a_decoder_draw_by_their_seed():
    model, ids = tiny_model("kda"), tokens(2, 5)
    decoder = Decoder(model, 2, sampling=Sampling(1.0), seed=4)
    streams = [torch.stack(list(decoder.stream(ids, max_new_tokens=9, seed=x)), 1) for x in (None, 4, 5, None)]
    assert torch.equal(streams[0], streams[1]) and torch.equal(streams[0], streams[3])
    expected = deltazoo.generate(model, ids, max_new_tokens=9, temperature=1.0, seed=5)[:, 5:]
    assert torch.equal(streams[2], expected) and not torch.equal(streams[2], streams[0])


@pytest.mark.parametrize("device", DEVICES)
def test_sampled_tokens_are_not_the_same_draw_over_and_over(device):
    """A graph that replayed one random state would draw the same token each time; uniform draws of 61 tokens do not."""
    model, ids = tiny_model("kda").to(device), tokens(1, 5).to(device)
    made = deltazoo.generate(model, ids, max_new_tokens=40, temperature=1e6)
    assert len(set(made[0, 5:].tolist())) > 15


def test_streaming_hands_out_the_prompt_and_every_token():
    model, ids, streamer = tiny_model("gated_deltanet"), tokens(1, 6), Mock(spec=BaseStreamer)
    made = deltazoo.generate(model, ids, max_new_tokens=5, streamer=streamer)
    received = [call.args[0].flatten() for call in streamer.put.call_args_list]
    assert list(map(len, received)) == [6, 1, 1, 1, 1, 1] and torch.equal(torch.cat(received), made[0])
    streamer.end.assert_called_once_with()


def test_tokens_come_one_by_one():
    steps = Decoder(tiny_model("kda")).stream(tokens(1, 4), max_new_tokens=10**9)
    assert [next(steps).shape for _ in range(3)] == [(1,)] * 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_dtype(dtype):
    model, ids = tiny_model("hybrid"), tokens(2, 7)
    mask = torch.tensor([[1] * 7, [0] * 4 + [1] * 3])
    made = deltazoo.generate(model, ids, mask.to(dtype), max_new_tokens=9)
    assert torch.equal(made, deltazoo.generate(model, ids, mask, max_new_tokens=9))


@pytest.mark.parametrize("device", DEVICES)
def test_of_two_streams_of_a_decoder_the_first_cannot_go_on(device):
    """One that nobody reads changes nothing, and the second is as if alone."""
    model = tiny_model("gated_deltanet").to(device)
    decoder, ids = Decoder(model), tokens(1, 5).to(device)
    first = decoder.stream(tokens(1, 5, seed=1).to(device), max_new_tokens=9)
    next(first)
    second = decoder.stream(ids, max_new_tokens=9)
    decoder.stream(tokens(1, 5, seed=2).to(device))
    made = [next(second)]
    with pytest.raises(RuntimeError, match="another stream of this decoder has begun"):
        list(first)
    assert torch.equal(torch.stack([*made, *second], dim=1), plain(model, ids)[:, 5:].cpu())


class TestErrors:
    @pytest.mark.parametrize(
        ("ids", "options", "message"),
        [
            (tokens(2, 4), {}, r"\[1, T\] with T >= 1, got \(2, 4\)"),
            (tokens(1, 0), {}, r"got \(1, 0\)"),
            (tokens(1, 4), {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
            (tokens(1, 4), {"attention_mask": torch.ones(1, 3)}, r"\(1, 4\), got \(1, 3\)"),
            (tokens(1, 4), {"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "pad prompts on the left"),
            (tokens(1, 4), {"attention_mask": torch.full((1, 4), 2)}, "1 for real tokens and 0 for padding, got 2"),
            (tokens(1, 4), {"attention_mask": torch.tensor([[-1, 1, 1, 1]])}, "0 for padding, got -1"),
            (tokens(1, 4), {"attention_mask": torch.full((1, 4), 0.5)}, "0 for padding, got 0.5"),
            (tokens(1, 4), {"max_new_tokens": 197}, "4 prompt tokens and 197 new ones exceed max_length=200"),
        ],
    )
    def test_prompts(self, ids, options, message):
        with pytest.raises(ValueError, match=message):
            Decoder(tiny_model("gated_deltanet"), max_length=200).stream(ids, **options)

    def test_prompts_that_are_no_batch_of_tokens(self):
        model = tiny_model("kda")
        for ids, error, message in (
            (tokens(1, 3)[0], ValueError, r"must have shape \[B, T\] with B and T >= 1, got \(3,\)"),
            ("a prompt", TypeError, r"a tensor of token ids \[B, T\], from a tokenizer: .*; got str"),
            ([[1, 2, 3]], TypeError, "got list"),
        ):
            for call in (partial(deltazoo.generate, model), Decoder(model).stream):
                with pytest.raises(error, match=message):
                    call(ids)

    @pytest.mark.parametrize(
        ("case", "options", "message"),
        [
            ("hybrid", {}, "max_length is needed"),
            ("llama all", {}, "max_length is needed"),
            ("kda", {"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
            ("kda", {"eos_token_id": [3, 61]}, r"of the 61 tokens of the vocabulary, got \[3, 61\]"),
            ("kda", {"pad_token_id": -1}, "pad_token_id must be of the 61 tokens of the vocabulary, got -1"),
        ],
    )
    def test_options(self, case, options, message):
        with pytest.raises(ValueError, match=message):
            Decoder(model_of(case), **options)

    def test_models(self):
        with pytest.raises(ValueError, match="training mode"):
            Decoder(tiny_model("kda").train())
        with pytest.raises(ValueError, match="got Linear"):
            Decoder(torch.nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"deltazoo\.accelerate makes them of transformers' own\), got Qwen3Next"):
            Decoder(foreign_model("qwen3_next"), max_length=10)
        with pytest.raises(ValueError, match="got LlamaForCausalLM: use its generate"):
            Decoder(tiny_original("llama"), max_length=10)
        adapted = get_peft_model(tiny_model("kda"), LoraConfig(task_type="CAUSAL_LM")).eval()
        with pytest.raises(ValueError, match=r"got PeftModelForCausalLM: pass its get_base_model\(\)"):
            Decoder(adapted)
        assert Decoder(adapted.get_base_model())

    @pytest.mark.parametrize(
        ("rules", "message"),
        [
            ({"repetition_penalty": 5.0}, r"repetition_penalty=5.0: use model.generate, or set it to None"),
            (
                {"suppress_tokens": [3], "min_new_tokens": 4},
                r"min_new_tokens=4, suppress_tokens=\[3\]: .* them to None",
            ),
            ({"num_beams": 2}, "num_beams=2"),
            ({"forced_eos_token_id": 0}, "forced_eos_token_id=0"),
        ],
    )
    def test_rules_for_the_logits(self, rules, message):
        model = tiny_model("kda")
        model.generation_config.update(**rules)
        with pytest.raises(ValueError, match=message):
            deltazoo.generate(model, tokens(1, 4))

    def test_rules_that_change_nothing(self):
        """The values that transformers takes for "none", and how its own loop draws."""
        model, ids = tiny_model("kda"), tokens(1, 4)
        expected = plain(model, ids)
        neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "num_beams": 1}
        drawing = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
        model.generation_config.update(**neutral, **drawing, suppress_tokens=[], remove_invalid_values=False)
        assert torch.equal(deltazoo.generate(model, ids, max_new_tokens=9), expected)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("temprature", "unexpected argument 'temprature'; did you mean 'temperature'?"),
            ("prefill_chunk_size", "did you mean 'prefill_chunk'?"),
            ("do_sample", "unexpected argument 'do_sample'; other options of transformers are those of model.generate"),
        ],
    )
    def test_unknown_options(self, name, message):
        with pytest.raises(TypeError, match=message.replace("?", r"\?")):
            deltazoo.generate(tiny_model("kda"), tokens(1, 4), **{name: 1})

    @pytest.mark.parametrize("seed", [2**63 - 1, -(2**63) - 1, 0.5])
    def test_seeds(self, seed):
        with pytest.raises(ValueError, match=f"seed must be a whole number from {-(2**63)} to {2**63 - 2}, got "):
            deltazoo.generate(tiny_model("kda"), tokens(2, 4), seed=seed)

    def test_the_last_seed(self):
        model, ids, options = tiny_model("kda"), tokens(2, 4), {"max_new_tokens": 4, "temperature": 1.0}
        made = deltazoo.generate(model, ids, seed=2**63 - 2, **options)
        assert torch.equal(made[1:], deltazoo.generate(model, ids[1:], seed=2**63 - 1, **options))

    def test_sampling_of_another_class(self):
        for sampling in ({"temperature": 1.0}, {}):
            with pytest.raises(TypeError, match=r"sampling must be a deltazoo.generation.Sampling, got \{"):
                Decoder(tiny_model("kda"), sampling=sampling)

    def test_sampling_without_temperature(self):
        with pytest.raises(ValueError, match="temperature=0"):
            deltazoo.generate(tiny_model("kda"), tokens(1, 4), top_p=0.5)
        assert Sampling(0.5, top_p=0.5).temperature == 0.5
