"""`model.generate` with a captured step: the outputs of plain `generate`, whatever the way of decoding.

On a CPU the steps run over the fixed tensors that a CUDA graph would use, without the graph.
"""

import copy
import gc
import pickle
import weakref

import accelerate
import pytest
import torch
from tiny_models import FEW, STATES, tiny_model, tokens
from torch import nn
from transformers import CompileConfig, DynamicCache, LogitsProcessorList, StaticCache
from transformers.generation.streamers import BaseStreamer

import deltazoo
from deltazoo.generation import capture, hf_generate, step
from deltazoo.generation.static_cache import FixedTensors

WAYS = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 20},
    "beam": {"do_sample": False, "num_beams": 3},
    "beam_sample": {"do_sample": True, "num_beams": 2},
    "samples_returned": {"do_sample": True, "num_return_sequences": 2},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def generate(model, ids, **options):
    torch.manual_seed(3)
    return model.generate(ids, **{"max_new_tokens": 8, **options})


def plain(model, ids, **options):
    return generate(model, ids, capture_step=False, **options)


@pytest.mark.parametrize(
    ("case", "device"), [("hybrid", "cpu"), *(pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in FEW)]
)
@pytest.mark.parametrize("way", WAYS)
def test_equals_plain_generate(way, case, device):
    """On a CPU for all the other models `TestWithoutKeyword`."""
    model, ids = tiny_model(case).to(device), tokens(2, 6).to(device)
    expected = plain(model, ids, **WAYS[way])
    assert torch.equal(generate(model, ids, capture_step=True, **WAYS[way]), expected)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("case", [case for case in STATES if case not in FEW])
def test_greedy_for_other_states(case):
    """Every rule in such a cache: test_decoder.py."""
    model, ids = tiny_model(case), tokens(2, 6)
    assert torch.equal(generate(model, ids, capture_step=True, do_sample=False), plain(model, ids, do_sample=False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", FEW)
def test_left_padded(case, device):
    model, ids = tiny_model(case).to(device), tokens(2, 6).to(device)
    mask = torch.tensor([[1] * 6, [0] * 4 + [1] * 2], device=device)
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(generate(model, ids, capture_step=True, **options), plain(model, ids, **options))


@pytest.mark.parametrize("case", FEW)
def test_one_step_is_captured_and_the_rest_is_replayed(case, monkeypatch):
    captures, steps = [], []

    def counting(step, changed, *, compiled):
        captures.append(len(changed))
        return lambda: (steps.append(1), step())

    monkeypatch.setattr(step, "capture", counting)
    generate(tiny_model(case), tokens(2, 6), capture_step=True, do_sample=False, eos_token_id=-1)
    assert len(captures) == 1 and len(steps) == 7  # the first of eight tokens comes from the prompt


def test_moved_rows_return_to_their_addresses():
    model, ids = tiny_model("hybrid"), tokens(3, 5)
    cache = StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    fixed, keys = FixedTensors(cache), cache.layers[1].keys
    addresses = [x.data_ptr() for x in fixed.changed]
    before = [x.clone() for x in (cache.layers[0].recurrent_states[0], keys)]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert cache.layers[1].keys is not keys
    fixed.put_back()
    assert cache.layers[1].keys is keys
    assert [x.data_ptr() for x in fixed.changed] == addresses
    for now, then in zip((cache.layers[0].recurrent_states[0], keys), before, strict=True):
        assert torch.equal(now, then[[2, 0, 0]])


def test_a_forward_pass_that_was_replaced_is_given_back():
    """accelerate, for example, puts its hooks into the model's own `forward`."""
    model, ids = tiny_model("hybrid"), tokens(1, 5)
    expected = generate(model, ids, do_sample=False)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    hooked = vars(model)["forward"]
    assert torch.equal(generate(model, ids, capture_step=True, do_sample=False), expected)
    assert vars(model)["forward"] is hooked


def test_the_forward_pass_is_given_back_after_an_error():
    model = tiny_model("gated_deltanet")
    with pytest.raises(KeyError):
        generate(model, tokens(1, 4), capture_step=True, logits_processor=LogitsProcessorList([Failing()]))
    assert "forward" not in vars(model)
    assert generate(model, tokens(1, 4), capture_step=True).shape == (1, 12)


class Failing:
    def __call__(self, input_ids, scores):
        raise KeyError("the caller's own")


def offloaded() -> DynamicCache:
    """Without the streams that transformers makes for it, for which torch for CUDA wants a driver."""
    cache = DynamicCache()
    cache.offloading = True
    return cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"past_key_values": offloaded()}, "the cache is offloaded"),
        ({"use_cache": False}, "use_cache=False keeps no state"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
        ({"custom_generate": lambda model, ids, **kwargs: ids}, "custom_generate brings a loop of its own"),
        ({"compile_config": CompileConfig()}, "compile_config asks"),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_what_it_cannot_do_is_refused(options, message):
    model = tiny_model("gated_deltanet")
    with pytest.raises(ValueError, match=f"capture_step=True cannot act: {message}"):
        generate(model, tokens(1, 4), capture_step=True, do_sample=False, **options)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("case", FEW)
def test_a_static_cache_of_the_user(case):
    model, ids = tiny_model(case), tokens(2, 6)
    cache = StaticCache(config=model.config, max_cache_len=14)
    assert torch.equal(
        generate(model, ids, capture_step=True, do_sample=False, past_key_values=cache),
        plain(model, ids, do_sample=False),
    )
    assert int(cache.get_seq_length()) == 13


class TestWithoutKeyword:
    """`capture_step` not given, which captures on a GPU alone; the fixture makes the CPU pass for one."""

    def test_on_a_cpu_nothing_is_captured(self):
        model = tiny_model("gated_deltanet")
        assert deltazoo.report(model).decoding == (
            "generate runs the ordinary loop: the model is on cpu, where there are no CUDA graphs"
        )
        generate(model, tokens(1, 4))
        assert vars(model)["_captured_steps"].last.startswith("the ordinary loop: the model is on cpu")

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("case", [*FEW, "softmax_only"])
    def test_equals_plain_generate(self, case, way, captures):
        model, ids = tiny_model(case), tokens(2, 6)
        assert torch.equal(generate(model, ids, **WAYS[way]), plain(model, ids, **WAYS[way]))
        assert len(captures) == 1
        generate(model, ids)
        assert "\ngenerate captures its step in a CUDA graph (the last call: captured)" in str(deltazoo.report(model))

    @pytest.mark.parametrize("case", ["kda_without_conv", "hybrid"])
    @pytest.mark.parametrize(
        "options",
        [
            {"attention_mask": torch.tensor([[1] * 6, [0] * 4 + [1] * 2]), "pad_token_id": 0},
            {"prefill_chunk_size": 3},
            {"prefill_chunk_size": 5},  # the last piece is one token
            {"eos_token_id": list(range(0, 60, 3)), "pad_token_id": 60},
            {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
            {"max_new_tokens": 1},
            {"max_new_tokens": 2},
            {"max_time": 60.0},
            {"guidance_scale": 2.0},  # asks the model for other logits, over a cache of its own
        ],
        ids=lambda options: "-".join(options),
    )
    def test_arguments_that_leave_the_step_alone(self, case, options, captures):
        model, ids = tiny_model(case), tokens(2, 6)
        assert torch.equal(generate(model, ids, **options), plain(model, ids, **options))
        if options.get("max_new_tokens") == 1:
            assert not captures
        elif "eos_token_id" not in options:  # the first token may end both rows
            assert len(captures) in ((1, 2) if "prefill_chunk_size" in options else (1,))

    @pytest.mark.parametrize("case", FEW)
    def test_a_prompt_of_embeddings(self, case, captures):
        model = tiny_model(case)
        embeddings = model.get_input_embeddings()(tokens(2, 6)).detach()
        options = {"inputs_embeds": embeddings, "max_new_tokens": 8}
        assert torch.equal(model.generate(**options), model.generate(capture_step=False, **options))
        assert len(captures) == 1

    def test_streaming(self, captures):
        model, ids, received = tiny_model("hybrid"), tokens(1, 6), []

        class Streamer(BaseStreamer):
            def put(self, value):
                received.append(value.flatten())

            def end(self):
                received.append(None)

        made = generate(model, ids, streamer=Streamer())
        assert torch.equal(torch.cat(received[:-1]), made[0]) and received[-1] is None
        assert len(captures) == 1

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"capture_step": False}, "capture_step=False"),
            ({"num_beams": 2, "output_attentions": True}, "output_attentions=True"),
            ({"output_hidden_states": True}, "output_hidden_states=True"),
            ({"return_dict_in_generate": True}, "return_dict_in_generate=True hands out the cache"),
            ({"use_cache": False}, "use_cache=False"),
            ({"cache_implementation": "dynamic"}, "cache_implementation='dynamic' was asked for"),
            ({"cache_implementation": "static"}, "cache_implementation='static' was asked for"),
            ({"past_key_values": True}, "a cache was given"),
            ({"custom_generate": lambda model, ids, **kwargs: ids}, "custom_generate"),
        ],
        ids=lambda x: "" if isinstance(x, str) else "-".join(x),
    )
    def test_arguments_that_need_the_ordinary_loop(self, options, reason, captures):
        model, ids = tiny_model("hybrid"), tokens(1, 6)
        if "past_key_values" in options:
            options = {"past_key_values": DynamicCache(config=model.config)}
        made = generate(model, ids, **options)
        if isinstance(made, dict):
            assert type(made.past_key_values) is DynamicCache
        assert not captures and "forward" not in vars(model)
        assert reason in deltazoo.report(model).decoding

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
            (lambda m: m.config.__setattr__("_attn_implementation", "flex_attention"), "runs 'flex_attention'"),
        ],
    )
    def test_models_that_need_the_ordinary_loop(self, change, reason, captures):
        model = tiny_model("hybrid")
        change(model)
        assert reason in deltazoo.report(model).decoding

    def test_autocast(self, captures):
        model = tiny_model("hybrid")
        with torch.autocast("cpu", torch.bfloat16):
            generate(model, tokens(1, 4))
        assert not captures and "autocast is on" in vars(model)["_captured_steps"].last

    def test_too_little_memory_for_all_keys_at_once(self, captures, monkeypatch):
        model, ids = tiny_model("hybrid"), tokens(2, 6)
        monkeypatch.setattr(hf_generate, "_free_bytes", lambda device: 10_000)
        assert torch.equal(generate(model, ids), plain(model, ids, max_new_tokens=8))
        assert not captures
        generate(tiny_model("gated_deltanet"), ids)
        assert len(captures) == 1

    def test_a_step_that_cannot_be_captured(self, captures, monkeypatch):
        attempts = []

        def failing(step, changed, *, compiled):
            attempts.append(step)
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        monkeypatch.setattr(step, "capture", failing)
        model, ids = tiny_model("hybrid"), tokens(2, 6)
        for _ in range(2):
            assert torch.equal(generate(model, ids), plain(model, ids))
            generate(model, ids)
            assert "failed (operation not permitted when stream is capturing)" in deltazoo.report(model).decoding
        assert len(attempts) == 1  # until the model changes
        model.set_attn_implementation("eager")
        generate(model, ids)
        assert len(attempts) == 2
        with pytest.raises(RuntimeError, match="not permitted"):
            generate(tiny_model("hybrid"), ids, capture_step=True)

    def test_calls_inside_a_call(self, captures):
        """A processor of logits that calls the same model, as guidance does."""
        model, ids = tiny_model("hybrid"), tokens(1, 6)
        expected_inside = plain(model, tokens(1, 5), do_sample=False)

        class Asking:
            def __call__(self, input_ids, scores):
                assert torch.equal(model.generate(tokens(1, 5), max_new_tokens=8, do_sample=False), expected_inside)
                return scores

        made = generate(model, ids, do_sample=False, logits_processor=LogitsProcessorList([Asking()]))
        assert torch.equal(made, plain(model, ids, do_sample=False)) and len(captures) == 1


class TestBetweenCalls:
    @pytest.mark.parametrize("case", ["gated_deltanet", "hybrid_without_conv"])
    def test_one_step_serves_calls_of_the_same_rows(self, case, captures):
        model = tiny_model(case)
        for seed, (rows, length, count) in enumerate([(2, 6, 1), (2, 11, 1), (2, 1, 1), (3, 6, 2), (2, 6, 3)]):
            ids = tokens(rows, length, seed=seed)
            for options in ({"do_sample": False}, {"do_sample": True}):
                assert torch.equal(generate(model, ids, **options), plain(model, ids, **options))
            assert len(captures) == count

    def test_beams_leave_keys_where_the_next_call_finds_them(self, captures):
        model, ids = tiny_model("hybrid"), tokens(2, 6)
        generate(model, ids[:1], num_beams=2)
        assert torch.equal(generate(model, ids, do_sample=False), plain(model, ids, do_sample=False))
        assert len(captures) == 1

    def test_a_longer_call_of_a_hybrid_gets_a_longer_cache(self, captures):
        model = tiny_model("hybrid")
        for length, count in ((6, 1), (260, 2), (6, 2)):
            ids = tokens(1, length)
            assert torch.equal(generate(model, ids, do_sample=False), plain(model, ids, do_sample=False))
            assert len(captures) == count

    @pytest.mark.parametrize(
        ("change", "captured_again"),
        [
            (lambda m: [p.data.mul_(1.1) for p in m.parameters()], False),
            (lambda m: m.load_state_dict({k: 1.1 * x for k, x in m.state_dict().items()}), False),
            (lambda m: m.load_state_dict({k: 1.1 * x for k, x in m.state_dict().items()}, assign=True), True),
            (lambda m: setattr(m.lm_head, "weight", nn.Parameter(-m.lm_head.weight.detach())), True),
            (lambda m: setattr(m.model.layers[1], "mlp", copy.deepcopy(m.model.layers[0].mlp)), True),
            (lambda m: m.set_runtime(backend="reference"), True),
            (lambda m: m.set_attn_implementation("eager"), True),
            (lambda m: setattr(m.config, "num_hidden_layers", 1), True),
            (lambda m: m.double(), True),
            (lambda m: m.train().eval(), True),
        ],
        ids=[
            "in_place",
            "loaded",
            "assigned",
            "parameter",
            "module",
            "backend",
            "attention",
            "layers",
            "dtype",
            "train",
        ],
    )
    def test_changes_of_the_model_are_seen(self, change, captured_again, captures):
        model, ids = tiny_model("hybrid"), tokens(2, 6)
        generate(model, ids)
        change(model)
        assert torch.equal(generate(model, ids, do_sample=False), plain(model, ids, do_sample=False))
        assert (len(captures) > 1) == captured_again

    def test_adapters_come_and_go(self, captures):
        peft = pytest.importorskip("peft")
        model, ids = tiny_model("hybrid"), tokens(2, 6)
        base = generate(model, ids, do_sample=False)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"], r=2, init_lora_weights=False)
        adapted = peft.get_peft_model(model, config).eval()

        def check(count):
            made = generate(adapted, ids, do_sample=False)
            assert torch.equal(made, plain(adapted, ids, do_sample=False))
            assert len(captures) == count
            return made

        with_adapter = check(2)
        assert not torch.equal(with_adapter, base)
        check(2)
        with adapted.disable_adapter():
            assert torch.equal(check(3), base)
        adapted.merge_adapter()
        check(4)

    def test_inference_mode(self, captures):
        model, ids = tiny_model("hybrid"), tokens(2, 6)
        with torch.inference_mode():
            first = generate(model, ids, do_sample=False)
        assert torch.equal(generate(model, ids, do_sample=False), first) and len(captures) == 2

    def test_much_memory_is_freed(self, captures, monkeypatch):
        model, ids = tiny_model("gated_deltanet"), tokens(2, 6)
        monkeypatch.setattr(hf_generate, "_total_bytes", lambda device: 64_000)
        generate(model, ids)
        assert vars(model)["_captured_steps"].kept is None

    @pytest.mark.parametrize("change", [lambda m: m.train(), lambda m: m.to(torch.bfloat16)], ids=["train", "cast"])
    def test_memory_is_freed_when_the_model_does_something_else(self, change, captures):
        model = tiny_model("gated_deltanet")
        generate(model, tokens(2, 6))
        assert vars(model)["_captured_steps"].kept is not None
        change(model)
        assert vars(model)["_captured_steps"].kept is None

    def test_copies_start_afresh(self, captures):
        model, ids = tiny_model("gated_deltanet"), tokens(2, 6)
        generate(model, ids)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert vars(twin)["_captured_steps"].kept is None
            assert torch.equal(generate(twin, ids), generate(model, ids))

    def test_a_model_is_freed_with_its_last_reference(self, captures, monkeypatch):
        """A graph holds no Python objects, and what is kept with it must hold no reference to the model."""

        def run_once(step, changed, *, compiled):
            step()
            return lambda: None

        monkeypatch.setattr(step, "capture", run_once)
        model = tiny_model("gated_deltanet")
        generate(model, tokens(2, 6))
        assert vars(model)["_captured_steps"].kept is not None
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
        kept = [capture.capture(lambda: x.add_(1), [x])]

        def step():
            if torch.cuda.is_current_stream_capturing():
                cycle = [kept.pop()]
                cycle.append(cycle)
                del cycle
                _ = [[] for _ in range(5000)]  # enough for Python to look for garbage
            x.add_(1)

        capture.capture(step, [x])()
        assert x.item() == 1 and gc.isenabled()

    @pytest.mark.parametrize("case", FEW)
    def test_weights_changed_in_place_are_read_anew(self, case):
        model, ids = tiny_model(case).cuda(), tokens(2, 6).cuda()
        generate(model, ids)
        kept = vars(model)["_captured_steps"].kept
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        assert torch.equal(generate(model, ids, do_sample=False), plain(model, ids, do_sample=False))
        assert vars(model)["_captured_steps"].kept is kept

    def test_a_step_that_waits_for_the_device(self):
        class Waiting(nn.Module):
            def forward(self, x):
                return x * (1.0 if x.sum().item() < 1e9 else 2.0)

        model, ids = tiny_model("hybrid").cuda(), tokens(2, 6).cuda()
        model.model.norm = nn.Sequential(model.model.norm, Waiting())
        for _ in range(2):
            assert torch.equal(generate(model, ids, do_sample=False), plain(model, ids, do_sample=False))
            generate(model, ids)
            assert "capturing the step failed" in deltazoo.report(model).decoding
        other = tiny_model("hybrid").cuda()
        assert torch.equal(generate(other, ids, do_sample=False), plain(other, ids, do_sample=False))
        generate(other, ids)
        assert deltazoo.report(other).decoding.endswith("(the last call: captured)")
