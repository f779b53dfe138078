"""Choosing layers, reports, dry runs, and refusals that leave the model as it was."""

import re

import pytest
import torch
from tiny_families import NUM_LAYERS, swapped, tiny_original, tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaForCausalLM

import deltazoo
from deltazoo.swap import swapped_layers
from deltazoo.swap.plan import choose_layers


class TestChoosingLayers:
    @pytest.mark.parametrize(
        ("choice", "expected"),
        [
            ("all", [0, 1, 2, 3, 4, 5]),
            ("3:1", [0, 1, 2, 4, 5]),
            ("1:2", [0, 3]),
            ("1:0", [0, 1, 2, 3, 4, 5]),
            ([4, 1], [1, 4]),
            ("4,1", [1, 4]),
            (range(2), [0, 1]),
            (lambda index: index > 3, [4, 5]),
        ],
    )
    def test_ways_to_say_it(self, choice, expected):
        assert choose_layers(choice, 6) == expected

    @pytest.mark.parametrize(
        ("choice", "message"),
        [
            ([6], "numbered 0 to 5, got 6"),
            ([-1], "numbered 0 to 5, got -1"),
            ([True], "numbered 0 to 5, got True"),
            ([1, 1], "names a layer twice"),
            ([], "chooses none of the 6 layers"),
            ("0:1", "chooses none"),
            ("0:0", "a ratio such as"),
            ("half", "a ratio such as"),
            ("0,,1", "numbers such as"),
            (lambda index: False, "chooses none"),
            (3, "a sequence of numbers or a function, got 3"),
            (None, "a sequence of numbers or a function, got None"),
        ],
    )
    def test_refused(self, choice, message):
        with pytest.raises(ValueError, match=message):
            choose_layers(choice, 6)


class TestReport:
    def test_counts_and_names(self):
        model = tiny_original("gemma3_text")
        before = sum(p.numel() for p in model.parameters())
        report = deltazoo.swap_attention(model, "gated_deltanet", [0, 1], rope=False)
        assert report.parameters_before == before
        assert report.parameters_after == sum(p.numel() for p in model.parameters())
        for layer in report.layers:
            parameters = {name for name, _ in swapped_layers(model)[layer.index].delta.named_parameters()}
            assert set(layer.copied) | set(layer.created) == parameters and not set(layer.copied) & set(layer.created)
        assert {"q_proj.weight", "k_norm.weight", "o_proj.weight"} <= set(report.layers[0].copied)
        assert report.layers[0].dropped == ("rotary embedding", "window of 5 tokens")
        assert report.layers[1].dropped == ("rotary embedding",)

    def test_memory_is_what_caches_take(self):
        model = tiny_original("gemma2")
        report = deltazoo.swap_attention(model, "kda", [0, 3])
        with torch.no_grad():
            cache = model(tokens(1, 50)).past_key_values
        states = {i: cache.layers[i].state for i in (0, 3)}
        taken = {i: sum(x.nbytes for x in state if x is not None) for i, state in states.items()}
        assert {layer.index: layer.state_bytes for layer in report.layers} == taken
        per_token = 2 * 2 * 8 * 4  # keys and values, heads, channels, bytes
        for num_tokens, (before, after) in report.memory.items():
            assert before == per_token * (2 * 5 + 2 * num_tokens)  # two layers have windows of 5
            assert after == sum(taken.values()) + per_token * (5 + num_tokens)
        assert list(report.memory) == [1024, 32768, 1048576]

    def test_prints_as_tables(self):
        printed = str(deltazoo.swap_attention(tiny_original("llama"), "delta_net", "3:1"))
        assert "llama: 3 of 4 attention layers swapped for delta_net" in printed
        assert "0, 1, 2" in printed and "parameters" in printed
        assert "cache of one sequence of 1,048,576 tokens" in printed

    def test_dry_run_changes_nothing(self):
        model, ids = tiny_original("qwen3"), tokens(1, 5)
        before = {name: (id(x), x.clone()) for name, x in model.state_dict(keep_vars=True).items()}
        logits, text = model(ids).logits, repr(model)
        planned = deltazoo.swap_attention(model, "kda", "1:1", keep_teacher=True, dry_run=True)
        after = model.state_dict(keep_vars=True)
        assert all(id(after[name]) == number and torch.equal(after[name], x) for name, (number, x) in before.items())
        assert all(p.requires_grad for p in model.parameters())
        assert repr(model) == text and type(model.config).__name__ == "Qwen3Config"
        assert torch.equal(model(ids).logits, logits)
        assert "would be swapped" in str(planned)
        done = deltazoo.swap_attention(model, "kda", "1:1")
        assert (planned.layers, planned.memory, planned.parameters_after) == (
            done.layers,
            done.memory,
            done.parameters_after,
        )


def assert_untouched(model, match, *args, error=ValueError, **kwargs):
    """A swap is refused with that message, and the model's modules, classes and flags are what they were."""
    before = [(name, id(m), type(m)) for name, m in model.named_modules()]
    flags = [p.requires_grad for p in model.parameters()]
    config = type(model.config)
    with pytest.raises(error, match=match):
        deltazoo.swap_attention(model, *(args or ("gated_deltanet",)), **kwargs)
    assert [(name, id(m), type(m)) for name, m in model.named_modules()] == before
    assert [p.requires_grad for p in model.parameters()] == flags
    assert type(model.config) is config and not hasattr(model.config, "delta_layers")


class TestRefusedAndUntouched:
    def test_unknown_family(self):
        config = AutoConfig.for_model(
            "opt", hidden_size=32, num_hidden_layers=1, ffn_dim=32, num_attention_heads=2, word_embed_proj_dim=32
        )
        model = AutoModelForCausalLM.from_config(config)
        assert_untouched(model, "'opt' cannot be swapped; known families: llama, mistral.*one entry in")

    def test_encoder_decoder(self):
        config = AutoConfig.for_model("t5", d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        assert_untouched(AutoModelForSeq2SeqLM.from_config(config), "'t5' cannot be swapped; known families")

    def test_cross_attention(self):
        assert_untouched(tiny_original("gpt2", add_cross_attention=True), "has cross-attention")

    def test_attention_that_looks_ahead(self):
        assert_untouched(tiny_original("gemma3_text", use_bidirectional_attention=True), "looks ahead")

    @pytest.mark.parametrize(
        ("keep_teacher", "advice"), [(True, "call unswap_attention, then"), (False, "start from the original model")]
    )
    def test_swapped_already(self, keep_teacher, advice):
        model = swapped("llama", [0], "delta_net", keep_teacher=keep_teacher)
        with pytest.raises(ValueError, match=f"is swapped already: {advice}.*all layers to be swapped in one call"):
            deltazoo.swap_attention(model, "delta_net", [1])
        assert list(swapped_layers(model)) == [0]

    def test_quantised(self):
        model = tiny_original("llama")
        model.is_quantized = True
        assert_untouched(model, "quantised; swap the unquantised model")

    def test_adapted_projections_in_a_later_layer(self):
        model = tiny_original("llama")
        model.model.layers[2].self_attn.v_proj = nn.Sequential(model.model.layers[2].self_attn.v_proj)
        assert_untouched(model, "layer 2: expected v_proj to be a plain linear map, got torch.nn.*Sequential")

    def test_quantised_weights(self):
        model = tiny_original("llama")
        model.model.layers[1].self_attn.k_proj.weight = nn.Parameter(
            torch.zeros(16, 32, dtype=torch.int8), requires_grad=False
        )
        assert_untouched(model, r"layer 1: k_proj holds torch.int8")

    def test_weights_tied_between_layers(self):
        model = tiny_original("llama")
        model.model.layers[3].self_attn.q_proj.weight = model.model.layers[1].self_attn.q_proj.weight
        assert_untouched(model, r"layers \[1, 3\]|layers \(1, 3\)")

    def test_weights_that_are_not_in_memory(self):
        with torch.device("meta"):
            model = LlamaForCausalLM(tiny_original("llama").config)
        assert_untouched(model, "layer 0: the weights are not in memory")

    @pytest.mark.parametrize("init", ["transfer", "random"])
    def test_norms_over_all_heads_and_several_keys_per_token(self, init):
        model = tiny_original("olmo2")
        message = "num_micro_steps=2: qk_norm=False leaves the norms out"
        assert_untouched(model, message, "gated_deltaproduct", init=init)
        deltazoo.swap_attention(model, "gated_deltaproduct", init=init, qk_norm=False)
        assert model(tokens(1, 5)).logits.isfinite().all()

    def test_class_of_the_users_own(self):
        class MyLlama(LlamaForCausalLM):
            pass

        assert_untouched(
            MyLlama(tiny_original("llama").config), "MyLlama is no class that Auto classes load for 'llama'"
        )

    def test_not_a_transformers_model(self):
        with pytest.raises(TypeError, match="expected a transformers model, got Linear"):
            deltazoo.swap_attention(nn.Linear(2, 2), "delta_net")

    @pytest.mark.parametrize(
        ("arguments", "message", "error"),
        [
            ({"layers": [NUM_LAYERS]}, "numbered 0 to 3, got 4", ValueError),
            ({"rule": "gated_delta_net"}, "did you mean 'gated_deltanet'", ValueError),
            ({"init": "zeros"}, 'init must be "transfer" or "random"', ValueError),
            ({"convsize": 3}, "unknown option 'convsize'; did you mean 'conv_size'", TypeError),
            ({"rop": True}, r"'rop'; did you mean 'rope'\? known: layers, init, rope, qk_norm", TypeError),
            ({"use_short_conv": False, "conv_size": 7}, "conv_size=7 acts only with", ValueError),
            ({"num_heads": 2}, "num_heads is decided by the weights", ValueError),
            ({"decay_lower_bound": 1.0}, "must be negative", ValueError),
            ({"rule": "delta_net", "decay_lower_bound": -1.0}, "has no decay", ValueError),
            ({"grouped": True, "init": "random", "num_v_heads": 8}, "choose one", ValueError),
            ({"backend": "chunk"}, "did you mean 'chunkwise'", ValueError),
            ({"fused_kernels": "no"}, "fused_kernels must be True, False or None, got 'no'", ValueError),
            ({"allow_neg_eigval": "no"}, "allow_neg_eigval must be True or False, got 'no'", ValueError),
            *(
                ({name: "no"}, f"{name} must be True or False, got 'no'", ValueError)
                for name in ("rope", "qk_norm", "grouped", "keep_teacher", "dry_run")
            ),
        ],
    )
    @pytest.mark.parametrize("dry_run", [False, True])
    def test_arguments(self, arguments, message, error, dry_run):
        arguments = {"rule": "gated_deltanet", "dry_run": dry_run, **arguments}
        assert_untouched(tiny_original("llama"), message, arguments.pop("rule"), error=error, **arguments)


@pytest.mark.parametrize(("family", "has_experts"), [("mixtral", True), ("llama", False)])
def test_what_can_be_set_is_what_the_original_can(family, has_experts, monkeypatch):
    """transformers finds it out from the source of a class's module, once."""
    model = swapped(family, [0])
    for cls in type(model).__mro__:
        for name in ("_can_set_experts_implementation_cached_value", "_can_set_attn_implementation_cached_value"):
            if name in vars(cls):
                monkeypatch.delattr(cls, name)
    assert type(model)._can_set_attn_implementation()
    assert type(model)._can_set_experts_implementation() == has_experts
    if has_experts:
        model.set_experts_implementation("eager")
        assert model.config._experts_implementation == "eager"


def test_the_report_says_when_no_softmax_layer_sees_all_tokens_any_more():
    """Layers 1 and 3 of four see all tokens, the others have windows."""
    model = tiny_original("gemma3_text")
    for layers, left in (([1, 3], True), ([0, 1, 2], False), ("all", False)):
        report = deltazoo.swap_attention(model, "gated_deltanet", layers, dry_run=True)
        assert report.only_windows_left is left
        assert ("have sliding windows" in re.sub(r"\s+", " ", str(report))) is left
    windows_alone = tiny_original("mistral")
    assert not deltazoo.swap_attention(windows_alone, "gated_deltanet", [0], dry_run=True).only_windows_left
