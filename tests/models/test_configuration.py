import json
import math
import re

import pytest
import torch
from tiny_models import CASES, CONFIGS, HYBRID, SIZES, tiny_config, tiny_model
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from deltazoo.models import (
    DeltaNetConfig,
    DeltaRuleConfig,
    DeltaRuleForCausalLM,
    GatedDeltaNetConfig,
    GatedLinearAttentionConfig,
    KDAConfig,
    PrecondKDAConfig,
    configuration,
)
from deltazoo.models.softmax_attention import RotaryEmbedding


@pytest.mark.parametrize("case", CASES)
def test_survives_saving_and_loading(case, tmp_path):
    config = tiny_config(case, eos_token_id=3)
    config.save_pretrained(tmp_path)
    loaded = DeltaRuleConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict() | {"transformers_version": loaded.transformers_version}
    assert DeltaRuleConfig(**json.loads((tmp_path / "config.json").read_text())).to_dict() == loaded.to_dict()


@pytest.mark.parametrize("case", CASES)
def test_every_entry_of_a_plan_names_a_module(case):
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(case, dtype=dtype)
        modules = {re.sub(r"\.\d+", ".*", name) for name, _ in model.named_modules()}
        assert set(model._fsdp_plan) <= modules and set(model._pp_plan) <= modules
    assert not any(key.startswith("base_model") for key in model.config.to_dict())


@pytest.mark.parametrize("arguments", [{"tp_plan": "auto"}, {"tp_size": 2}])
def test_tensor_parallelism_is_refused_with_what_there_is_instead(arguments, tmp_path):
    tiny_model("gated_deltanet").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="DeltaRuleForCausalLM has no tensor parallelism.*fully_shard_model"):
        AutoModelForCausalLM.from_pretrained(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hiden_size": 32}, r"unknown key 'hiden_size'; did you mean 'hidden_size'\?"),
        ({"mixer": "gated_delta_net"}, "did you mean 'gated_deltanet'"),
        ({"layer_types": ["linear_attention"]}, "num_hidden_layers=2 layers, got 1"),
        ({"layer_types": ["linear_attention", "full_atention"]}, "did you mean 'full_attention'"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "unknown layer type 'sliding_attention'"),
        ({"layer_types": HYBRID["layer_types"]}, "need num_attention_heads"),
        ({**HYBRID, "num_attention_heads": 5}, "must divide hidden_size = 32, got 5"),
        ({**HYBRID, "num_key_value_heads": 3}, "must divide num_attention_heads = 4, got 3"),
        ({**HYBRID, "num_attention_heads": 32, "num_key_value_heads": 32}, "even head size, got 32 / 32 = 1"),
        ({"num_v_heads": 3}, "num_v_heads=3 must be a multiple of num_heads=2"),  # by the layer, as other options
        ({"num_heads": 3, "head_dim": None}, "num_heads must divide hidden_size = 32"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be positive, got 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be positive, got 0"),
        ({"num_micro_steps": 0}, "num_micro_steps must be positive, got 0"),
        ({"neg_eigval": "none", "allow_neg_eigval": True}, "'both' or 'erase'"),
        ({"decay_lower_bound": math.nan}, "decay_lower_bound must be finite, got nan"),
        ({"hidden_ratio": 0, "intermediate_size": None}, "hidden_ratio must be finite and positive, got 0"),
        ({**HYBRID, "rope_parameters": {"rope_thetaa": 5.0}}, "rope_parameters: unknown key 'rope_thetaa'; did you"),
        ({**HYBRID, "rope_parameters": {"rope_type": "yarnn"}}, "unknown rope_type 'yarnn'; did you mean 'yarn'"),
        ({**HYBRID, "rope_parameters": {"rope_theta": 0.0}}, "rope_theta must be a positive, finite number, got 0.0"),
        ({**HYBRID, "rope_parameters": {"rope_theta": "10"}}, "rope_theta must be a positive, finite number, got '10'"),
        ({**HYBRID, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'linear' needs the key 'factor'"),
        (
            {**HYBRID, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}},
            "must give positive, finite frequencies and scale, got .inf, inf",
        ),
        (
            {**HYBRID, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2.0}},
            "must turn 2 to 8 channels, the size of a softmax head, got 16",
        ),
        (
            {**HYBRID, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}},
            "must turn 2 to 8 channels, the size of a softmax head, got 0",
        ),
        ({"pad_token_id": -1}, "pad_token_id must be at least 0 and less than vocab_size = 61, or None, got -1"),
        ({"pad_token_id": 61}, "less than vocab_size = 61, or None, got 61"),
    ],
)
def test_contradictions_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        DeltaRuleConfig(**{**SIZES, **overrides})


SOFTMAX_ONLY = {**HYBRID, "layer_types": ["full_attention"] * 2}


def test_options_that_have_passed_make_no_layer_again(monkeypatch):
    """The check makes a layer on the meta device, which takes ten times as long as the rest of a configuration."""
    made = []
    monkeypatch.setattr(configuration, "make_layer", lambda **options: made.append(options["conv_size"]))
    configuration._check_layer.cache_clear()
    for conv_size in (3, 3, 5, 3):
        tiny_config("kda", conv_size=conv_size)
    assert made == [3, 5]
    configuration._check_layer.cache_clear()


@pytest.mark.parametrize(
    "idle",
    [
        {"neg_eigval": "erase"},
        {"mixer": "linear_attention", "allow_neg_eigval": True},
        {"mixer": "delta_net", "decay_lower_bound": -5.0},
        {"expand_v": 1.3},
    ],
)
def test_options_of_linear_layers_may_contradict_each_other_where_there_are_none(idle, tmp_path):
    DeltaRuleConfig(**{**SIZES, **SOFTMAX_ONLY, **idle}).save_pretrained(tmp_path)
    loaded = DeltaRuleConfig.from_pretrained(tmp_path)
    assert {key: getattr(loaded, key) for key in idle} == idle


@pytest.mark.parametrize(
    "wrong",
    [{"num_v_heads": 3}, {"norm_eps": 0.0}, {"initializer_range": -1.0}, {"conv_initializer_range": -1.0}],
)
def test_but_some_must_be_right_in_all_models(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DeltaRuleConfig(**{**SIZES, **SOFTMAX_ONLY, **wrong})


@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_was_saved_loads_with_keys_of_others(model_type, tmp_path):
    """Attributes that other tools set on a configuration: scripts for LoRA, Unsloth, older versions of transformers."""
    foreign = {
        "pretraining_tp": 1,
        "tokenizer_class": "LlamaTokenizer",
        "is_decoder": True,
        "torchscript": False,
        "attention_bias": True,
        "unsloth_version": "2026.1",
        "rms_norm_eps": 1.0,
        "nested": {"list": [1, None]},
    }
    # As others read them, and through the keys that fla-hub's classes need as well.
    for overrides in ({}, HYBRID):
        config = CONFIGS[model_type](**{**SIZES, **overrides})
        for key, value in foreign.items():
            setattr(config, key, value)
        with pytest.warns(UserWarning, match="keys that do not act on this model are kept: 'attention_bias'"):
            config.save_pretrained(tmp_path)
        with pytest.warns(UserWarning, match="'rms_norm_eps' .unknown; did you mean 'norm_eps'") as warned:
            loaded = AutoConfig.from_pretrained(tmp_path)
        assert len(warned) == 1 and "tokenizer_class" not in str(warned[0].message)  # AutoTokenizer reads it
        assert loaded.to_dict() == config.to_dict() | {"_name_or_path": str(tmp_path)}
        assert {key: getattr(loaded, key) for key in foreign} == foreign
        # A configuration of the same keys, as tools make it from the dictionary.
        with pytest.warns(UserWarning, match="do not act"):
            assert type(loaded)(**loaded.to_dict()).to_dict() == loaded.to_dict()


class TestUnknownKeys:
    def test_a_caller_gets_an_error_and_a_file_does_not(self):
        with pytest.raises(ValueError, match="unknown key 'attention_bias'"):
            DeltaRuleConfig(attention_bias=True)
        with pytest.warns(UserWarning, match="'attention_bias'"):  # a file without transformers_version
            assert DeltaRuleConfig.from_dict({"attention_bias": True}).attention_bias

    @pytest.mark.parametrize(("key", "value"), [("temperature", 0.3), ("max_length", 5), ("num_beams", 3)])
    def test_keys_of_generation_come_from_files_alone(self, key, value, recwarn):
        with pytest.raises(ValueError, match=f"{key} says how a model generates, and is no key of its configuration"):
            DeltaRuleConfig(**{key: value})
        assert not hasattr(DeltaRuleConfig.from_dict({key: value}), key) and not recwarn.list

    def test_rope_keys_of_others_are_kept(self):
        rope = {"rope_type": "default", "rope_theta": 5.0, "added": 1}
        with pytest.raises(ValueError, match="rope_parameters: unknown key 'added'"):
            DeltaRuleConfig(**SIZES, **HYBRID, rope_parameters=dict(rope))
        assert DeltaRuleConfig.from_dict({**SIZES, **HYBRID, "rope_parameters": dict(rope)}).rope_parameters == rope
        with pytest.raises(ValueError, match="did you mean 'rope_theta'"):
            DeltaRuleConfig.from_dict({**SIZES, **HYBRID, "rope_parameters": {"rope_thetaa": 5.0}})

    @pytest.mark.parametrize("typo", ["hiden_size", "hidden_sizes", "num_kv_heads", "mixr", "conv_szie"])
    def test_a_typo_is_refused_wherever_it_comes_from(self, typo):
        with pytest.raises(ValueError, match=f"unknown key '{typo}'; did you mean"):
            DeltaRuleConfig.from_dict({typo: 4})
        config = DeltaRuleConfig(**SIZES)
        with pytest.raises(AttributeError, match=f"unknown key '{typo}'; did you mean"):
            setattr(config, typo, 4)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("hidden_act", "relu"),
            ("num_v_heads", 3),
            ("mixer", "kda"),
            ("layer_types", ["none"]),
            ("neg_eigval", "nope"),
        ],
    )
    def test_what_would_not_load_is_not_saved(self, key, value, tmp_path):
        config = GatedDeltaNetConfig(**SIZES)
        setattr(config, key, value)
        with pytest.raises(ValueError, match=f"GatedDeltaNetConfig cannot be saved.*{key}"):
            config.save_pretrained(tmp_path)
        assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("model_type", CONFIGS)
def test_keys_of_softmax_layers_wait_for_such_layers(model_type, tmp_path):
    """A hybrid's keys with fewer layers, and tools that give every model num_attention_heads."""
    keys = {"num_attention_heads": 4, "num_key_value_heads": 2, "qkv_bias": True}
    keys["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    with pytest.warns(UserWarning, match=r"'num_attention_heads' \(acts on softmax layers, and layer_types has none"):
        config = CONFIGS[model_type](**SIZES, **keys)
    assert {key: getattr(config, key) for key in keys} == keys
    assert '"num_attention_heads": 4' in repr(config)
    with pytest.warns(UserWarning, match="'rope_parameters'"):
        config.save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path).to_dict() == config.to_dict() | {"_name_or_path": str(tmp_path)}


@pytest.mark.parametrize("keys", [{"rope_theta": 500.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}])
def test_older_rope_keys_wait_for_softmax_layers(keys):
    with pytest.warns(UserWarning, match=r"'rope_parameters' \(acts on softmax layers, and layer_types has none"):
        config = DeltaRuleConfig(**SIZES, **keys)
    assert config.rope_parameters.items() >= keys.get("rope_scaling", keys).items()
    assert DeltaRuleConfig(**SIZES, rope_scaling=None).rope_parameters is None


def test_size_of_convolutions_waits_for_convolutions(recwarn):
    DeltaRuleConfig(**SIZES, use_short_conv=False, conv_size=4)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"are kept: 'conv_size' \(acts with use_short_conv=True\)"):
        config = DeltaRuleConfig(**SIZES, use_short_conv=False, conv_size=7)
    assert config.conv_size == 7 and DeltaRuleForCausalLM(config).model.layers[0].attn.conv_size == 0
    with pytest.warns(UserWarning, match=r"are kept: 'conv_initializer_range' \(acts with use_short_conv=True\)"):
        config = DeltaRuleConfig(**SIZES, use_short_conv=False, conv_initializer_range=0.02)
    assert DeltaRuleForCausalLM(config).model.layers[0].attn.conv_initializer_range is None


@pytest.mark.parametrize("model_type", CONFIGS)
def test_softmax_heads_set_on_a_pure_model_can_be_printed(model_type):
    config = CONFIGS[model_type](**SIZES)
    config.num_attention_heads = 4
    assert '"num_attention_heads": 4' in repr(config)


def test_named_type_keeps_its_rule():
    with pytest.raises(ValueError, match="model type 'kda' has the rule 'kda', got mixer='efla'"):
        KDAConfig(mixer="efla")


def test_every_key_acts():
    """Another value of a key changes the parameters' shapes, the outputs, or a documented behaviour."""
    hybrid = {**SIZES, **HYBRID, "mixer": "neg_gated_deltanet", "rope_parameters": {"rope_theta": 1e4}}
    flips = {
        "mixer": "kda",
        "vocab_size": 62,
        "hidden_size": 40,
        "num_hidden_layers": None,  # with layer_types, below
        "num_heads": 1,
        "num_v_heads": 4,
        "head_dim": 4,
        "expand_v": 1.0,
        "use_short_conv": False,
        "conv_size": 3,
        "conv_initializer_range": 0.02,
        "use_gate": False,
        "allow_neg_eigval": False,
        "neg_eigval": "erase",
        "decay_lower_bound": -5.0,
        "beta_bias": True,
        "gate_bias": None,  # with a low-rank gate, below
        "num_micro_steps": 2,
        "intermediate_size": 64,
        "hidden_ratio": None,  # with intermediate_size, below
        "norm_eps": 1e-2,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention", "linear_attention"],
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "qkv_bias": True,
        "softmax_qk_norm": True,
        "rope_parameters": {"rope_theta": 10.0},
    }
    # These describe no computation of the causal language model; the tests named here hold them.
    elsewhere = {
        "max_position_embeddings": "test_rope_scaling_reads_the_longest_sequence",
        "classifier_dropout": "test_heads",
        "use_cache": "test_cache",
        "mixer_module": "test_outside_rule",
        "mixer_revision": "test_revisions",
        "training_data": "test_sharing",
        "pad_token_id": "test_padding_token_embeds_to_zero",
        "bos_token_id": "generation",
        "eos_token_id": "generation",
    }
    own = set(DeltaRuleConfig.__annotations__) - {
        "model_type",
        "keys_to_ignore_at_inference",
        "base_model_pp_plan",
        "base_model_fsdp_plan",
    }
    assert own == set(flips) | set(elsewhere), "a new key needs a line here"

    def fingerprint(**overrides):
        torch.manual_seed(0)
        model = DeltaRuleForCausalLM(DeltaRuleConfig(**{**hybrid, **overrides})).eval()
        shapes = {name: p.shape for name, p in model.named_parameters()}
        with torch.no_grad():
            logits = model(torch.arange(12)[None] % 7).logits
        return shapes, logits

    shapes, logits = fingerprint()
    for key, value in flips.items():
        if value is None:
            continue
        other_shapes, other_logits = fingerprint(**{key: value})
        assert other_shapes != shapes or not torch.equal(other_logits, logits), f"{key}={value!r} changes nothing"
    assert len(fingerprint(num_hidden_layers=1, layer_types=["linear_attention"], num_attention_heads=None,
                           num_key_value_heads=None, rope_parameters=None)[0]) < len(shapes)  # fmt: skip
    assert len(fingerprint(mixer="kda", gate_bias=False)[0]) < len(fingerprint(mixer="kda")[0])
    assert DeltaRuleConfig(hidden_ratio=2).intermediate_size < DeltaRuleConfig().intermediate_size


def test_padding_token_embeds_to_zero():
    model = DeltaRuleForCausalLM(tiny_config("gated_deltanet", pad_token_id=5))
    assert model.model.embeddings.weight[5].abs().max() == 0


def test_rope_scaling_reads_the_longest_sequence():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    short = DeltaRuleForCausalLM(tiny_config("hybrid", rope_parameters=dict(rope), max_position_embeddings=8)).eval()
    long = DeltaRuleForCausalLM(tiny_config("hybrid", rope_parameters=dict(rope), max_position_embeddings=64)).eval()
    long.load_state_dict(short.state_dict())
    ids = torch.arange(16)[None]
    assert not torch.allclose(short(ids).logits[:, -1], long(ids).logits[:, -1])


@pytest.mark.parametrize("head_dim", [5, 7])
def test_rope_turns_the_heads_of_softmax_layers_whatever_the_linear_ones_have(head_dim):
    """transformers refuses odd heads for RoPE, and reads the size that is ours for linear layers."""
    model = DeltaRuleForCausalLM(tiny_config("hybrid", head_dim=head_dim)).eval()
    assert model.model.rotary_emb.inv_freq.shape == (4,)
    assert model(torch.arange(6)[None]).logits.isfinite().all()


def test_partial_rotary_factor_acts_on_every_rope_type():
    def rotary(**rope):
        config = tiny_config("hybrid", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5, **rope})
        return RotaryEmbedding(config)

    default, linear = rotary(rope_type="default"), rotary(rope_type="linear", factor=1.0)
    torch.testing.assert_close(default.inv_freq, torch.tensor([1.0, 1e-2]))
    torch.testing.assert_close(default.inv_freq, linear.inv_freq)


class TestFlaHubKeys:
    def test_kernel_choices_are_dropped(self):
        config = GatedDeltaNetConfig(
            **SIZES, attn_mode="chunk", fuse_norm=True, fuse_swiglu=True, fuse_cross_entropy=True, hidden_act="swish"
        )
        assert "fuse_norm" not in config.to_dict()

    def test_head_width_relative_to_the_model(self):
        config = DeltaNetConfig(hidden_size=32, num_heads=4, expand_k=0.5, expand_v=1, num_hidden_layers=1)
        assert (config.head_dim, config.expand_v) == (4, 2.0)

    def test_hybrid_layers(self):
        config = KDAConfig(
            hidden_size=32,
            num_heads=2,
            head_dim=8,
            num_hidden_layers=3,
            attn={"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "rope_theta": 500.0},
        )
        assert config.layer_types == ["linear_attention", "full_attention", "linear_attention"]
        assert (config.num_attention_heads, config.num_key_value_heads, config.qkv_bias) == (4, 2, True)
        assert config.rope_parameters["rope_theta"] == 500.0

    @pytest.mark.parametrize(
        "key",
        [
            {"use_beta": False},
            {"qk_norm": "sum"},
            {"qk_activation": "relu"},
            {"use_l2warp": True},
            {"attnres_block_size": 4},
            {"output_gate_activation": "sigmoid"},
            {"use_output_correction": False},
            {"use_inner_decay": False},
            {"squash_x": 2.0},
            {"squash_eps": 1e-3},
            {"feature_map": "relu"},
            {"clamp_min": -1.0},
        ],
    )
    def test_other_models_are_refused(self, key):
        with pytest.raises(NotImplementedError, match=next(iter(key))):
            DeltaNetConfig(**key)

    def test_activation_of_the_output_gate(self):
        GatedDeltaNetConfig(**SIZES, output_gate_activation="silu")
        KDAConfig(**SIZES, output_gate_activation="sigmoid")

    @pytest.mark.parametrize(
        ("config_class", "keys", "error", "message"),
        [
            (KDAConfig, {"output_gate_activation": "swish"}, NotImplementedError, "only 'sigmoid'"),
            (KDAConfig, {"lower_bound": -5.0, "decay_lower_bound": -4.0}, ValueError, "contradict"),
            (KDAConfig, {"safe_gate": True}, ValueError, "needs a bound"),
            (
                KDAConfig,
                {"attn": {"layers": [0], "num_heads": 4, "window_size": 9}},
                NotImplementedError,
                "window_size",
            ),
            (PrecondKDAConfig, {"num_v_heads": 4}, NotImplementedError, "num_v_heads=4 and num_heads=2 is not"),
            (
                GatedLinearAttentionConfig,
                {"num_kv_heads": 1},
                NotImplementedError,
                "num_kv_heads=1 .*, only num",
            ),
            (
                GatedDeltaNetConfig,
                {"num_householder": 3, "num_micro_steps": 2},
                ValueError,
                "3 and num_micro_steps=2 con",
            ),
            (GatedDeltaNetConfig, {"use_forget_gate": False}, ValueError, "and mixer='gated_deltanet' contradict"),
            (GatedDeltaNetConfig, {"correction_factor": 0.02}, ValueError, "unknown key 'correction_factor'"),
        ],
        ids=str,
    )
    def test_keys_that_are_refused(self, config_class, keys, error, message):
        with pytest.raises(error, match=message):
            config_class(**SIZES, **keys)

    def test_bound_on_the_decay(self):
        config = KDAConfig(**SIZES, safe_gate=True, lower_bound=-4.0)
        assert config.decay_lower_bound == -4.0
        saved = config.to_dict()
        assert (saved["lower_bound"], saved["safe_gate"]) == (-4.0, True)
        assert not KDAConfig(**SIZES, decay_lower_bound=-6.0).to_dict()["safe_gate"]
        assert "lower_bound" not in KDAConfig(**SIZES, safe_gate=False, lower_bound=None).to_dict()

    def test_heads_of_gla(self):
        sizes = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 1}
        config = GatedLinearAttentionConfig(**sizes, num_kv_heads=2, expand_k=0.5, expand_v=1.0)
        assert (config.head_dim, config.expand_v) == (8, 2.0)
        assert GatedLinearAttentionConfig(**sizes).to_dict() == config.to_dict()

    def test_names_of_the_same_key(self):
        config = GatedDeltaNetConfig(**SIZES, use_output_gate=False, num_householder=2)
        assert (config.use_gate, config.num_micro_steps) == (False, 2)

    def test_initial_values_of_saved_models_are_dropped(self):
        initial = {"correction_factor": 0.02, "log_atk_scale_init": 0.0, "a_log_init_lower": 0}
        config = GatedDeltaNetConfig.from_dict({**SIZES, **initial})
        assert not any(hasattr(config, key) for key in initial)

    def test_softmax_layers_in_a_list(self):
        alike = [{"layers": [2], "num_heads": 4}, {"layers": [0], "num_heads": 4}]
        config = KDAConfig(hidden_size=32, num_heads=2, head_dim=8, num_hidden_layers=3, attn=alike)
        assert config.layer_types == ["full_attention", "linear_attention", "full_attention"]
        with pytest.raises(NotImplementedError, match="differ"):
            KDAConfig(num_hidden_layers=3, attn=[alike[0], {"layers": [0], "num_heads": 2}])

    @pytest.mark.parametrize("layers", [[1, 7], [-1], ["1"], [True]])
    def test_softmax_layers_that_are_none_are_refused(self, layers):
        with pytest.raises(ValueError, match=r"attn\['layers'\] must be numbers from 0 to 3, got"):
            KDAConfig(num_hidden_layers=4, attn={"layers": layers, "num_heads": 2})

    @pytest.mark.parametrize("attn", [{}, [], "x", {"num_heads": 2}, {"layers": [0]}, {"layers": 0, "num_heads": 2}])
    def test_softmax_layers_that_are_not_described(self, attn):
        with pytest.raises(ValueError, match=r'attn must be like \{"layers": .*, got'):
            KDAConfig(attn=attn)

    @pytest.mark.parametrize(
        ("said", "given"),
        [
            ({}, {"num_attention_heads": 2}),
            ({"num_kv_heads": 2}, {"num_key_value_heads": 1}),
            ({"qkv_bias": False}, {"qkv_bias": True}),
            ({"rope_theta": 5.0}, {"rope_theta": 9.0}),
            ({"rope_theta": 5.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}),
        ],
    )
    @pytest.mark.parametrize("layer_types", [None, ["linear_attention", "full_attention"]])
    def test_softmax_layers_described_twice(self, said, given, layer_types):
        attn = {"layers": [1], "num_heads": 4}
        if said:
            assert DeltaRuleConfig(**SIZES, attn=attn, layer_types=layer_types, **given).num_attention_heads == 4
        with pytest.raises(ValueError, match="attn says .*, which contradicts"):
            DeltaRuleConfig(**SIZES, attn={**attn, **said}, layer_types=layer_types, **given)

    def test_scaled_positions_keep_their_theta(self):
        attn = {"layers": [1], "num_heads": 4, "rope_theta": 5.0}
        config = DeltaRuleConfig(**SIZES, attn=attn, rope_scaling={"rope_type": "linear", "factor": 2.0})
        assert config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}

    @pytest.mark.parametrize(("use_gate", "has_gate"), [(True, True), (False, False), (None, True)])
    def test_use_gate(self, use_gate, has_gate):
        model = DeltaRuleForCausalLM(DeltaRuleConfig(**SIZES, mixer="gated_deltanet", use_gate=use_gate))
        assert hasattr(model.model.layers[0].attn, "g_proj") == has_gate


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_hidden_layers": 3}, "layer_types must name num_hidden_layers=3 layers, got 2"),
        ({"layer_types": HYBRID["layer_types"]}, r"softmax layers \(layer_types\) need num_attention_heads"),
        (HYBRID, "softmax layers need rope_parameters, such as"),
    ],
    ids=str,
)
def test_keys_that_were_changed_later_are_checked_when_a_model_is_made(overrides, message, tmp_path):
    """Arguments of from_pretrained are set on a configuration that has been checked."""
    DeltaRuleForCausalLM(tiny_config("gated_deltanet")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, **overrides)


def test_a_hybrid_is_built_of_fake_tensors():
    with FakeTensorMode():
        model = DeltaRuleForCausalLM(DeltaRuleConfig(**SIZES, **HYBRID))
    assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())


def test_a_partial_rotary_factor_of_none_turns_whole_heads():
    whole = DeltaRuleForCausalLM(DeltaRuleConfig(**SIZES, **HYBRID))
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": None}
    named = DeltaRuleForCausalLM(DeltaRuleConfig(**SIZES, **HYBRID, rope_parameters=rope))
    assert torch.equal(named.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)


def test_revisions():
    """A new model has the newest revision of its rule; a saved configuration that does not say has the first."""
    config = DeltaRuleConfig(**SIZES, mixer="eda")
    assert (config.mixer_revision, config.spec.output_gate) == (2, "full")
    again = DeltaRuleConfig.from_dict(config.to_dict())
    assert (again.mixer_revision, again.spec) == (2, config.spec)
    earlier = {key: value for key, value in config.to_dict().items() if key != "mixer_revision"}
    loaded = DeltaRuleConfig.from_dict(earlier)
    assert (loaded.mixer_revision, loaded.spec.output_gate) == (1, "low_rank")
    assert DeltaRuleConfig.from_dict(loaded.to_dict()).spec == loaded.spec
    assert DeltaRuleConfig(**SIZES, mixer="eda", mixer_revision=1).spec == loaded.spec
    with pytest.raises(ValueError, match="rule 'eda' has the revisions 1 to 2, got 3"):
        DeltaRuleConfig(**SIZES, mixer="eda", mixer_revision=3)


def test_new_models_of_pgdn_have_the_authors_shape():
    config = AutoConfig.for_model("precond_gated_deltanet")
    assert (config.head_dim, config.expand_v, config.use_gate) == (128, 1, False)
    assert config.num_heads * config.head_dim == config.hidden_size


# Layers, heads, channels of a key head, and those of a value head over them, as a new model of the type has them.
DEFAULT_SHAPES = {
    "delta_rule": (24, 16, 128, 2.0),
    "delta_net": (24, 16, 128, 1.0),
    "gated_deltanet": (21, 6, 256, 2.0),
    "kda": (24, 16, 128, 1.0),
    "efla": (24, 16, 128, 1.0),
    "gated_deltaproduct": (21, 6, 256, 2.0),
    "comba": (21, 6, 256, 2.0),
    "precond_kda": (24, 16, 128, 1.0),
    "precond_gated_deltanet": (24, 16, 128, 1.0),
    "gla": (24, 4, 256, 2.0),
}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_new_models_have_the_shape_of_their_type(model_type):
    config = CONFIGS[model_type]()
    assert config.model_type == model_type and config.rope_parameters is None
    assert config.layer_types == ["linear_attention"] * config.num_hidden_layers
    shape = (config.num_hidden_layers, config.num_heads, config.head_dim, config.expand_v)
    assert shape == DEFAULT_SHAPES[model_type]
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32000, 2048, 5632)
    assert config.use_short_conv == (model_type != "gla") and config.num_v_heads == config.num_heads
