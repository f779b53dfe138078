"""`model.generate` with a captured step gives the tokens of plain `generate`, whatever the arguments and the model.

On a CPU the steps run over the fixed tensors that a CUDA graph would use, without the graph. In test_decoder.py the
tokens of every kind of model are compared with its forward pass.
"""

import copy
import gc
import pickle
import re
import weakref
from contextlib import contextmanager

import accelerate
import foreign_models
import pytest
import torch
from decoding_loops import ACCELERATED, IDS, PADDED, assert_decodes_like_forward, captured, model_of, own
from foreign_models import SPARSE_SOFTMAX
from peft import LoraConfig, get_peft_model
from tiny_models import FEW, tiny_model, tokens
from torch import nn
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache, LogitsProcessorList, StaticCache
from transformers.generation import GenerationMixin

import deltazoo
from deltazoo.generation import Decoder, hf_generate, step
from deltazoo.generation.capture import capture

WAYS = {
    "sample": {"do_sample": True, "top_k": 20},
    "beam": {"do_sample": False, "num_beams": 3},
    "beam_sample": {"do_sample": True, "num_beams": 2},
    "samples_returned": {"do_sample": True, "num_return_sequences": 2},
}
KINDS = ["hybrid", "kda_without_conv", "llama 1:1", *ACCELERATED[:1]]
ON_A_GPU = [pytest.param(kind, "cuda", marks=pytest.mark.gpu) for kind in (*FEW, *ACCELERATED)]


def generate(model, ids=IDS, **options):
    torch.manual_seed(3)
    options = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": -1, **options}
    if "inputs_embeds" in options:
        return model.generate(**options)
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **options})


def assert_as_uncaptured(model, ids=IDS, **options):
    """The tokens of `generate`, which are those of the call that captures nothing."""
    made = generate(model, ids, **options)
    assert torch.equal(made, generate(model, ids, **{**options, "capture_step": False}))
    return made


def how(model):
    return deltazoo.report(model).decoding


def kept_by(model):
    return step.steps_of(model).kept


@pytest.mark.parametrize(("kind", "device"), [*((kind, "cpu") for kind in KINDS), *ON_A_GPU])
def test_on_demand(kind, device):
    """A static cache of the user's holds the states afterwards."""
    model = model_of(kind).to(device)
    for mask in (None, PADDED):
        made = assert_decodes_like_forward(model, captured, mask=mask)
    cache = StaticCache(config=model.config, max_cache_len=40)
    given = {"capture_step": True, "do_sample": False, "past_key_values": cache}
    for ids in (made[:, :1], made[:, :9]):  # a prompt of one token is no step yet
        cache.reset()
        first = generate(model, ids, **given)
        assert torch.equal(first, generate(model, ids, do_sample=False, capture_step=False))
        assert int(cache.get_seq_length()) == ids.shape[1] + 7
    again = generate(model, torch.cat([first, made[:, :2]], 1), **given)
    assert torch.equal(again, generate(model, again[:, :19], do_sample=False, capture_step=False))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "device"), [*((kind, "cpu") for kind in KINDS), *ON_A_GPU[: len(FEW)]])
def test_ways_to_choose_tokens(way, kind, device, request):
    captures = request.getfixturevalue("captures") if device == "cpu" else None
    model = model_of(kind).to(device)
    for _ in range(2):
        assert_as_uncaptured(model, IDS.to(device), **WAYS[way])
    assert captures is None or len(captures) == 1


@pytest.mark.parametrize("kind", ["hybrid", "llama 1:1", *ACCELERATED[:1]])
def test_a_graph_finds_all_at_its_addresses(kind, replays):
    """Beams change rows, and transformers' layers make new tensors of them."""
    assert_as_uncaptured(model_of(kind), capture_step=True, **WAYS["beam"])


@pytest.mark.parametrize("kind", ["hybrid", *ACCELERATED[:1]])
@pytest.mark.parametrize(
    ("options", "most_captures"),
    [
        ({"attention_mask": PADDED}, 1),
        ({"prefill_chunk_size": 3}, 2),
        ({"prefill_chunk_size": 6}, 2),  # the last piece is one token
        ({"eos_token_id": list(range(0, 60, 3)), "pad_token_id": 60}, 1),
        ({"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}, 1),
        ({"max_new_tokens": 1}, 0),
        ({"max_new_tokens": 2}, 1),
        ({"max_time": 60.0}, 1),
        ({"guidance_scale": 2.0}, 1),  # asks the model for other logits, over a cache of its own
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_arguments_that_leave_the_step_alone(kind, options, most_captures, captures):
    assert_as_uncaptured(model_of(kind), **options)
    least = 0 if "eos_token_id" in options else min(most_captures, 1)  # the first token may end both rows
    assert least <= len(captures) <= most_captures


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_embeddings(kind, captures):
    model = model_of(kind)
    embeddings = model.get_input_embeddings()(IDS).detach()
    made = assert_as_uncaptured(model, inputs_embeds=embeddings, do_sample=False)
    assert torch.equal(made, generate(model, do_sample=False)[:, 7:]) and len(captures) == 1


class TestCaches:
    @pytest.mark.parametrize("family", ACCELERATED[:2])
    def test_a_growing_one_of_the_user_keeps_the_ordinary_loop(self, family, captures):
        model, options = model_of(family), {"do_sample": False, "return_dict_in_generate": True}
        first = generate(model, **options)
        conversation = torch.cat([first.sequences, tokens(2, 3, seed=1)], dim=1)
        made = generate(model, conversation, do_sample=False, past_key_values=first.past_key_values)
        assert torch.equal(made, generate(model, conversation, do_sample=False, capture_step=False)) and not captures
        used = generate(model, **options).past_key_values
        with pytest.raises(ValueError, match="capture_step=True cannot act: the cache has been used"):
            generate(model, conversation, past_key_values=used, capture_step=True)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_prompts_with_pictures(family, captures):
    """Of several sizes, so that positions differ: one step serves all."""
    model = foreign_models.model_with_pictures(family)
    deltazoo.accelerate(model)
    for patches in (4, 8, 12):
        picture = [foreign_models.VOCAB - 3] + [foreign_models.VOCAB - 1] * patches
        ids = torch.cat([torch.tensor([picture]), foreign_models.tokens(1, 20 - patches).clamp(max=50)], dim=1)
        assert_as_uncaptured(
            model,
            ids,
            do_sample=False,
            pixel_values=torch.randn(4 * patches, 3 * 4 * 4, generator=torch.Generator().manual_seed(patches)),
            image_grid_thw=torch.tensor([[1, patches, 4]]),
            mm_token_type_ids=(ids == foreign_models.VOCAB - 1).int(),
        )
    assert len(captures) == 1


class TestTheOrdinaryLoop:
    def test_on_a_cpu(self):
        model = tiny_model("gated_deltanet")
        generate(model)
        reason = "the ordinary loop: the model is on cpu, where there are no CUDA graphs"
        assert how(model) == f"generate runs {reason} (the last call: {reason})"

    @pytest.mark.parametrize(
        ("options", "reason", "is_refused"),
        [
            ({"capture_step": False}, "capture_step=False", False),
            ({"output_attentions": True, "num_beams": 2}, "output_attentions=True", True),
            ({"output_hidden_states": True}, "output_hidden_states=True", True),
            ({"return_dict_in_generate": True}, "return_dict_in_generate=True hands out the cache", False),
            ({"use_cache": False}, "use_cache=False keeps no state", True),
            ({"cache_implementation": "dynamic"}, "cache_implementation='dynamic' was asked for", False),
            ({"cache_implementation": "static"}, "cache_implementation='static' was asked for", False),
            ({"past_key_values": False}, "a cache was given", False),
            ({"past_key_values": True}, "the cache is offloaded", True),
            ({"custom_generate": lambda model, ids, **kwargs: ids}, "custom_generate brings a loop of its own", True),
            ({"compile_config": CompileConfig()}, "compile_config asks", True),
        ],
        ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
    )
    def test_arguments_that_need_it(self, options, reason, is_refused, captures):
        model = tiny_model("hybrid")
        if "past_key_values" in options:
            cache = DynamicCache(config=model.config)
            # Without the streams that transformers makes for it, for which torch for CUDA wants a driver.
            cache.offloading, options = options["past_key_values"], {"past_key_values": cache}
        if is_refused:
            with pytest.raises(ValueError, match=f"capture_step=True cannot act: {reason}"):
                generate(model, IDS[:1], capture_step=True, **options)
        if "compile_config" not in options and not getattr(options.get("past_key_values"), "offloading", False):
            made = generate(model, IDS[:1], **options)
            assert not isinstance(made, dict) or type(made.past_key_values) is DynamicCache
            assert reason in how(model)
        assert not captures

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda m: m.train(), "training mode"),
            (lambda m: m.model.layers[0].register_forward_hook(lambda *a: None), "model.layers.0 has a forward hook"),
            (lambda m: m.lm_head.register_forward_pre_hook(lambda *a: None), "lm_head has a forward hook"),
            (lambda m: accelerate.dispatch_model(m, {"": "cpu"}, force_hooks=True), "has been replaced"),
            (lambda m: setattr(m.model.norm, "forward", m.model.norm.forward), "model.norm has been replaced"),
            (lambda m: m.model.layers[1].compile(), "model.layers.1 has been replaced"),
            (lambda m: setattr(m, "hf_quantizer", object()), "quantised"),
            (lambda m: m.lm_head.to("meta"), "lm_head.weight is on meta and the model on cpu"),
            (lambda m: setattr(m, "_tp_size", 2), "divided among processes"),
            (lambda m: torch.set_autocast_enabled("cpu", True), "autocast is on"),
            (lambda m: m.config.__setattr__("_attn_implementation", "flex_attention"), "runs 'flex_attention'"),
        ],
    )
    def test_models_that_need_it(self, change, reason, captures):
        model = tiny_model("hybrid")
        with torch.autocast("cpu", enabled=False):
            change(model)
            assert reason in how(model)

    @pytest.mark.parametrize("family", [family for family in SPARSE_SOFTMAX if family in foreign_models.FUSED])
    def test_sparse_softmax_layers(self, family, captures):
        model, ids = model_of(family), foreign_models.tokens(1, 4)
        reason = "cannot work on a cache with a StaticIndexedLayer (sparse softmax attention counts on the host"
        with pytest.raises(ValueError, match=re.escape(reason)):
            own(model, ids, torch.ones_like(ids), 2)
        generate(model, ids)
        assert reason in how(model)
        with pytest.raises(ValueError, match="capture_step=True cannot act: the cache has a DynamicIndexedLayer"):
            generate(model, ids, capture_step=True)
        assert not captures

    def test_too_little_memory_for_all_keys_at_once(self, captures, monkeypatch):
        monkeypatch.setattr(hf_generate, "free_bytes", lambda device: 10_000)
        model = tiny_model("hybrid")
        assert_as_uncaptured(model)
        generate(model)
        assert not captures and "tokens take 0.0 GiB at once" in how(model)
        with pytest.raises(ValueError, match="capture_step=True cannot act: the keys and values of 256 tokens"):
            generate(model, capture_step=True)
        generate(tiny_model("gated_deltanet"))
        assert len(captures) == 1

    def test_a_step_that_cannot_be_captured(self, captures, monkeypatch):
        attempts = []

        def failing(step, changed):
            attempts.append(step)
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        monkeypatch.setattr(step, "capture", failing)
        model = tiny_model("hybrid")
        for _ in range(2):
            assert_as_uncaptured(model)
            generate(model)
            assert "failed (operation not permitted when stream is capturing)" in how(model)
        assert len(attempts) == 1  # until the model changes
        model.set_attn_implementation("eager")
        generate(model)
        assert len(attempts) == 2
        with pytest.raises(RuntimeError, match="not permitted"):
            generate(tiny_model("hybrid"), capture_step=True)

    def test_experts_that_are_chosen_on_the_host(self, captures):
        model = model_of("mixtral 1:1")
        model.set_experts_implementation("eager")
        assert_as_uncaptured(model)
        generate(model)
        assert "the ordinary loop: capturing the step failed" in how(model) and not captures


class TestForwardPasses:
    """Whose turn it is: the call's, the model's own, or that of what has replaced it."""

    def test_a_replaced_one_stays(self):
        """accelerate, for example, puts its hooks into the model's own `forward`."""
        model = tiny_model("hybrid")
        expected = generate(model, do_sample=False)
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
        hooked = vars(model)["forward"]
        assert torch.equal(generate(model, capture_step=True, do_sample=False), expected)
        assert vars(model)["forward"] is hooked

    def test_after_an_error_it_is_the_models_own(self):
        class Failing:
            def __call__(self, input_ids, scores):
                raise KeyError("the caller's own")

        model = tiny_model("gated_deltanet")
        with pytest.raises(KeyError):
            generate(model, capture_step=True, logits_processor=LogitsProcessorList([Failing()]))
        assert hf_generate.running_call(model) is None
        assert_as_uncaptured(model, capture_step=True)

    def test_calls_inside_a_call(self, captures):
        """A processor of logits that calls the same model, as guidance does."""
        model = tiny_model("hybrid")
        expected_inside = generate(model, tokens(1, 5), do_sample=False, capture_step=False)

        class Asking:
            def __call__(self, input_ids, scores):
                assert torch.equal(generate(model, tokens(1, 5), do_sample=False), expected_inside)
                return scores

        made = generate(model, do_sample=False, logits_processor=LogitsProcessorList([Asking()]))
        assert how(model).endswith("(the last call: captured)") and len(captures) == 1
        assert torch.equal(made, generate(model, do_sample=False, capture_step=False))


CHANGES = {
    "in_place": (lambda m: [p.data.mul_(1.1) for p in m.parameters()], False),
    "loaded": (lambda m: m.load_state_dict({k: 1.1 * x for k, x in m.state_dict().items()}), False),
    "assigned": (lambda m: m.load_state_dict({k: 1.1 * x for k, x in m.state_dict().items()}, assign=True), True),
    "parameter": (lambda m: setattr(m.lm_head, "weight", nn.Parameter(-m.lm_head.weight.detach())), True),
    "module": (lambda m: setattr(m.model.layers[1], "mlp", copy.deepcopy(m.model.layers[0].mlp)), True),
    "backend": (lambda m: m.set_runtime(backend="reference"), True),
    "attention": (lambda m: m.set_attn_implementation("eager"), True),
    "layers": (lambda m: setattr(m.config, "num_hidden_layers", 1), True),
    "dtype": (lambda m: m.double(), True),
    "train": (lambda m: m.train().eval(), True),
}
"""Of a model between two calls, and whether a step must be captured again."""


class TestBetweenCalls:
    @pytest.mark.parametrize("case", ["gated_deltanet", "hybrid_without_conv"])
    def test_one_step_serves_calls_of_the_same_rows(self, case, captures):
        model = tiny_model(case)
        for seed, (rows, length, count) in enumerate([(2, 6, 1), (2, 11, 1), (2, 1, 1), (3, 6, 2), (2, 6, 3)]):
            for do_sample in (False, True):
                assert_as_uncaptured(model, tokens(rows, length, seed=seed), do_sample=do_sample)
            assert len(captures) == count

    def test_beams_leave_keys_where_the_next_call_finds_them(self, captures):
        model = tiny_model("hybrid")
        generate(model, IDS[:1], num_beams=2)
        assert_as_uncaptured(model, do_sample=False)
        assert len(captures) == 1

    def test_a_longer_call_of_a_hybrid_gets_a_longer_cache(self, captures):
        model = tiny_model("hybrid")
        for length, count in ((6, 1), (260, 2), (6, 2)):
            assert_as_uncaptured(model, tokens(1, length), do_sample=False)
            assert len(captures) == count

    @pytest.mark.parametrize("name", CHANGES)
    def test_changes_of_the_model_are_seen(self, name, captures):
        model, (change, captured_again) = tiny_model("hybrid"), CHANGES[name]
        generate(model)
        change(model)
        assert_as_uncaptured(model, do_sample=False)
        assert (len(captures) > 1) == captured_again

    @pytest.mark.parametrize(
        ("kind", "maps"), [("hybrid", ["q_proj", "v_proj", "up_proj"]), ("qwen3_next", ["in_proj_qkvz", "o_proj"])]
    )
    def test_adapters_come_and_go(self, kind, maps, captures):
        model = model_of(kind)
        base = generate(model, do_sample=False)
        adapted = get_peft_model(model, LoraConfig(target_modules=maps, r=2, init_lora_weights=False)).eval()

        def check(count):
            made = assert_as_uncaptured(adapted, do_sample=False)
            assert len(captures) == count
            return made

        with_adapter = check(2)
        assert not torch.equal(with_adapter, base)
        check(2)
        with adapted.disable_adapter():
            assert torch.equal(check(3), base)
        adapted.merge_adapter()
        check(4)

    @pytest.mark.parametrize("kind", ["mixtral 1:1", "qwen3_5_moe"])
    def test_experts_with_another_implementation_in_decoding(self, kind, captures, monkeypatch):
        """As transformers switches it on a GPU."""
        model = model_of(kind)
        model.set_experts_implementation("grouped_mm")

        @contextmanager
        def switched(self):
            self.set_experts_implementation("batched_mm")
            yield
            self.set_experts_implementation("grouped_mm")

        expected = generate(model, do_sample=False, capture_step=False)
        monkeypatch.setattr(GenerationMixin, "_optimize_model_for_decode", switched, raising=False)
        for _ in range(2):
            assert torch.equal(generate(model, do_sample=False), expected)
        assert len(captures) == 1
        decoder = Decoder(model, 2, max_length=20, eos_token_id=[])
        for _ in range(2):
            assert torch.equal(torch.stack(list(decoder.stream(IDS, max_new_tokens=8)), dim=1), expected[:, 7:])
        assert len(captures) == 2

    def test_inference_mode(self, captures):
        model = tiny_model("hybrid")
        with torch.inference_mode():
            first = generate(model, do_sample=False)
        assert torch.equal(generate(model, do_sample=False), first) and len(captures) == 2

    def test_memory_is_freed(self, captures, monkeypatch):
        """When the model does something else, and at once if it is much, or the user's."""
        model = tiny_model("gated_deltanet")
        generate(model, capture_step=True, past_key_values=StaticCache(config=model.config, max_cache_len=40))
        assert len(captures) == 1 and kept_by(model) is None
        for change in (lambda: model.train().eval(), lambda: model.to(torch.float64)):
            generate(model)
            assert kept_by(model) is not None
            change()
            assert kept_by(model) is None
        monkeypatch.setattr(hf_generate, "_total_bytes", lambda device: 64_000)
        generate(model)
        assert kept_by(model) is None

    def test_copies_start_afresh(self, captures, tmp_path):
        model = model_of("llama 1:1")
        generate(model)
        model.save_pretrained(tmp_path)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert kept_by(twin) is None
            assert torch.equal(generate(twin), generate(model))
        loaded, count = AutoModelForCausalLM.from_pretrained(tmp_path), len(captures)
        assert torch.equal(generate(loaded), generate(model)) and len(captures) == count + 1

    def test_a_model_is_freed_with_its_last_reference(self, captures, monkeypatch):
        """A graph holds no Python objects, and what is kept with it must hold no reference to the model."""

        def run_once(step, changed):
            step()
            return lambda: None

        monkeypatch.setattr(step, "capture", run_once)
        model = tiny_model("gated_deltanet")
        generate(model)
        assert kept_by(model) is not None
        gc.collect()
        gc.disable()
        try:
            reference = weakref.ref(model)
            del model
            assert reference() is None
        finally:
            gc.enable()


@pytest.mark.gpu
class TestOnAGPU:
    """Properties that only a real graph shows."""

    def test_a_graph_in_the_garbage_ends_after_a_capture(self):
        x = torch.zeros(1, device="cuda")
        kept = [capture(lambda: x.add_(1), [x])]

        def step():
            if torch.cuda.is_current_stream_capturing():
                cycle = [kept.pop()]
                cycle.append(cycle)
                del cycle
                _ = [[] for _ in range(5000)]  # enough for Python to look for garbage
            x.add_(1)

        capture(step, [x])()
        assert x.item() == 1 and gc.isenabled()

    @pytest.mark.parametrize("case", FEW)
    def test_weights_changed_in_place_are_read_anew(self, case):
        model, ids = tiny_model(case).cuda(), IDS.cuda()
        generate(model, ids)
        kept = kept_by(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        assert_as_uncaptured(model, ids, do_sample=False)
        assert kept_by(model) is kept

    def test_a_step_that_waits_for_the_device(self):
        class Waiting(nn.Module):
            def forward(self, x):
                return x * (1.0 if x.sum().item() < 1e9 else 2.0)

        model, ids = tiny_model("hybrid").cuda(), IDS.cuda()
        model.model.norm = nn.Sequential(model.model.norm, Waiting())
        for _ in range(2):
            assert_as_uncaptured(model, ids, do_sample=False)
            generate(model, ids)
            assert "capturing the step failed" in how(model)
        other = tiny_model("hybrid").cuda()
        assert_as_uncaptured(other, ids, do_sample=False)
        generate(other, ids)
        assert how(other).endswith("(the last call: captured)")
