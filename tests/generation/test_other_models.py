"""Captured steps of swapped and accelerated models give the tokens of the ordinary `generate`."""

import re
from contextlib import contextmanager

import foreign_models
import pytest
import tiny_families
import torch
from decoding_loops import ACCELERATED, PADDED, model_of
from foreign_models import SPARSE_SOFTMAX
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.generation import GenerationMixin

import deltazoo
from deltazoo.generation import Decoder
from deltazoo.generation.library_modules import joint_maps
from deltazoo.generation.merged import merged_products
from deltazoo.generation.static_cache import FixedTensors, fixed_cache, move_cache


def ordinary(model, ids, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    off = {"capture_step": False} if hasattr(model, "describe_decoding") else {}
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1} | options
    torch.manual_seed(3)
    return model.generate(ids, attention_mask=mask, **off, **options)


@pytest.mark.parametrize("family", foreign_models.FUSED)
def test_maps_of_an_accelerated_layers_input_are_merged(family):
    model = model_of(family)
    mixer = foreign_models.mixer_of(model)
    merged = [list(product.linears) for product in merged_products(model)]
    mlps = [[x.gate_proj, x.up_proj] for x in model.modules() if joint_maps(type(x))]
    assert [x for maps in merged if maps not in mlps for x in maps] == [
        getattr(mixer, name) for name in mixer.input_projections
    ]
    assert [maps for maps in merged if maps in mlps] == mlps
    assert bool(mlps) == (family != "glm5_next")


@pytest.mark.parametrize("family", [family for family in SPARSE_SOFTMAX if family in foreign_models.FUSED])
def test_sparse_softmax_layers_keep_the_ordinary_loop(family, captures):
    model, ids = model_of(family), foreign_models.tokens(1, 4)
    reason = "cannot work on a cache with a StaticIndexedLayer (sparse softmax attention counts on the host"
    with pytest.raises(ValueError, match=re.escape(reason)):
        deltazoo.generate(model, ids)
    ordinary(model, ids)
    assert reason in deltazoo.report(model).decoding
    with pytest.raises(ValueError, match="capture_step=True cannot act: the cache has a DynamicIndexedLayer"):
        model.generate(ids, max_new_tokens=2, capture_step=True)
    assert not captures


WAYS = [{"attention_mask": PADDED}, {}, {"do_sample": True}, {"num_beams": 2}, {"prefill_chunk_size": 3}]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in ("llama 1:1", ACCELERATED[0]) for options in WAYS),
        *((kind, WAYS[0]) for kind in ("gemma3_text 1:1", "gpt_neox all", *ACCELERATED[1:])),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x) or "greedy",
)
def test_generate_captures_its_step(kind, options, captures):
    model, ids, options = model_of(kind), tiny_families.tokens(2, 7), dict(options)
    mask = options.pop("attention_mask", torch.ones_like(ids))
    expected = ordinary(model, ids, mask, **options)
    for _ in range(2):
        torch.manual_seed(3)
        made = model.generate(
            ids, attention_mask=mask, pad_token_id=0, eos_token_id=-1, max_new_tokens=12,
            **{"do_sample": False, **options},
        )  # fmt: skip
        assert torch.equal(made, expected)
    assert len(captures) in ((1, 2) if "prefill_chunk_size" in options else (1,))
    assert "(the last call: captured)" in deltazoo.report(model).decoding


@pytest.mark.parametrize("family", ACCELERATED)
def test_caches_that_the_caller_hands_in(family, captures):
    """A growing cache keeps the ordinary loop; a static one is captured on demand, and holds the states afterwards."""
    model, ids, more = model_of(family), foreign_models.tokens(2, 7), foreign_models.tokens(2, 3, seed=1)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}

    def generate(ids, **more_options):
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options, **more_options)

    first = generate(ids, return_dict_in_generate=True)
    conversation = torch.cat([first.sequences, more], dim=1)
    expected = ordinary(model, conversation, **options)
    assert torch.equal(generate(conversation, past_key_values=first.past_key_values), expected)
    assert not captures

    cache = StaticCache(config=model.config, max_cache_len=40)
    assert torch.equal(generate(ids, past_key_values=cache, capture_step=True), first.sequences)
    assert torch.equal(generate(conversation, past_key_values=cache, capture_step=True), expected)
    assert len(captures) == 2
    used = generate(ids, return_dict_in_generate=True).past_key_values
    with pytest.raises(ValueError, match="capture_step=True cannot act: the cache has been used"):
        generate(conversation, past_key_values=used, capture_step=True)


@pytest.mark.parametrize("family", ACCELERATED)
def test_states_of_accelerated_layers_stay_at_their_addresses(family):
    """Through steps, and when the next call's prompt moves in."""
    model, ids = model_of(family), foreign_models.tokens(2, 7)
    cache, growing = fixed_cache(model, 20), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :3], past_key_values=cache)
        addresses = [x.data_ptr() for x in FixedTensors(cache).changed]
        model(ids[:, 3:4], past_key_values=cache)
        model(ids[:, 4:], past_key_values=growing)
        cache.reset()
        move_cache(growing, cache)
        logits = model(ids[:, :1], past_key_values=cache).logits
        assert [x.data_ptr() for x in FixedTensors(cache).changed] == addresses
        alone = model(torch.cat([ids[:, 4:], ids[:, :1]], dim=1)).logits
    torch.testing.assert_close(logits[:, -1], alone[:, -1])


@pytest.mark.parametrize("family", ACCELERATED[:2])
def test_prompts_as_embeddings(family, captures):
    model, ids = model_of(family), foreign_models.tokens(2, 7)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    made = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **options)
    assert torch.equal(made, ordinary(model, ids, **options)[:, 7:])
    assert len(captures) == 1


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_prompts_with_pictures(family, captures):
    """Of several sizes, so that positions differ: one step serves all."""
    model = foreign_models.model_with_pictures(family)
    deltazoo.accelerate(model)
    for patches in (4, 8, 12):
        picture = [foreign_models.VOCAB - 3] + [foreign_models.VOCAB - 1] * patches
        ids = torch.cat([torch.tensor([picture]), foreign_models.tokens(1, 20 - patches).clamp(max=50)], dim=1)
        inputs = {
            "pixel_values": torch.randn(4 * patches, 3 * 4 * 4, generator=torch.Generator().manual_seed(patches)),
            "image_grid_thw": torch.tensor([[1, patches, 4]]),
            "mm_token_type_ids": (ids == foreign_models.VOCAB - 1).int(),
            "attention_mask": torch.ones_like(ids),
        }
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
        expected = model.generate(ids, capture_step=False, **inputs, **options)
        assert torch.equal(model.generate(ids, **inputs, **options), expected)
    assert len(captures) == 1


def test_adapters_on_an_accelerated_model_act_in_captured_steps(captures):
    model, ids = model_of("qwen3_next"), foreign_models.tokens(2, 7)
    plain = ordinary(model, ids)
    adapted = get_peft_model(model, LoraConfig(target_modules=["in_proj_qkvz", "o_proj"], init_lora_weights=False))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    made = adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    assert len(captures) == 1
    assert torch.equal(made, ordinary(adapted, ids)) and not torch.equal(made, plain)
    with adapted.disable_adapter():
        assert torch.equal(adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ACCELERATED)
def test_accelerated_models_on_a_gpu(family):
    model, ids = model_of(family).cuda(), foreign_models.tokens(2, 7).cuda()
    for mask in (torch.ones_like(ids), PADDED.cuda()):
        expected = ordinary(model, ids, mask)
        for _ in range(2):
            made = model.generate(
                ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
            assert torch.equal(made, expected)
        assert "(the last call: captured)" in deltazoo.report(model).decoding


@pytest.mark.parametrize("kind", ["mixtral 1:1", "qwen3_5_moe"])
def test_experts_with_another_implementation_in_decoding_keep_their_step(kind, captures, monkeypatch):
    """As transformers switches it on a GPU."""
    model, ids = model_of(kind), tiny_families.tokens(2, 7)
    model.set_experts_implementation("grouped_mm")

    @contextmanager
    def switched(self):
        self.set_experts_implementation("batched_mm")
        yield
        self.set_experts_implementation("grouped_mm")

    expected = ordinary(model, ids)
    monkeypatch.setattr(GenerationMixin, "_optimize_model_for_decode", switched, raising=False)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    for _ in range(2):
        assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **options), expected)
    assert len(captures) == 1
    decoder = Decoder(model, 2, max_length=20, eos_token_id=[])
    for _ in range(2):
        assert torch.equal(torch.stack(list(decoder.stream(ids, max_new_tokens=12)), dim=1), expected[:, 7:])
    assert len(captures) == 2


def test_experts_that_are_chosen_on_the_host_keep_the_ordinary_loop(captures):
    model, ids = model_of("mixtral 1:1"), tiny_families.tokens(2, 7)
    model.set_experts_implementation("eager")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    expected = ordinary(model, ids)
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **options), expected)
    assert "the ordinary loop: capturing the step failed" in deltazoo.report(model).decoding
    assert not captures


def test_a_loaded_swapped_model_captures_too(tmp_path, captures):
    model, ids = model_of("llama 1:1"), tiny_families.tokens(2, 7)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    assert torch.equal(loaded.generate(ids, attention_mask=mask, **options), ordinary(model, ids, **options))
    assert len(captures) == 1
