"""Runtime options: given when a model is made or loaded, changed later, never in config.json."""

import copy
import pickle
import warnings
from itertools import product

import pytest
import torch
from golden.freeze import CHECKPOINTS, RUNTIME_KEYS
from tiny_families import tiny_original
from tiny_models import tiny_config, tiny_model, tiny_named, tokens
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import deltazoo
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM, DeltaRuleModel
from deltazoo.runtime import FORMER_OPTIONS, RUNTIME_OPTIONS, RuntimeOptions

ON_A_GPU = {
    "backend": "triton",
    "fused_kernels": True,
    "fuse_linear_cross_entropy": True,
    "recompute": "block",
}


def runtime_of(model):
    """The options of the modules themselves, not those that the model records."""
    block = model.model.layers[0]
    convolutions = [block.attn.q_conv1d.fused, block.attn.v_conv1d.fused, block.attn.o_norm.fused]
    norms = [block.attn_norm.fused, block.mlp_norm.fused, block.mlp.fused, model.model.norm.fused]
    mixers = [layer.attn.fused_kernels for layer in model.model.layers]  # of which one is softmax attention
    fused = convolutions + norms + mixers
    return block.attn.backend, fused, model.runtime.fuse_linear_cross_entropy, block.recompute


ON = ("triton", [True] * 9, True, "block")


def test_every_option_reaches_what_it_acts_on_however_it_is_given(tmp_path):
    tiny_model("hybrid").save_pretrained(tmp_path)
    config = tiny_config("hybrid")
    made = DeltaRuleForCausalLM(config, **ON_A_GPU)
    changed = tiny_model("hybrid")
    assert runtime_of(changed) != ON
    changed.set_runtime(**ON_A_GPU)
    for model in (
        made,
        changed,
        AutoModelForCausalLM.from_config(config, **ON_A_GPU),
        AutoModelForCausalLM.from_pretrained(tmp_path, **ON_A_GPU),
        DeltaRuleForCausalLM.from_pretrained(tmp_path, **ON_A_GPU),
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
    ):
        assert runtime_of(model) == ON
        assert model.runtime == model.model.runtime == RuntimeOptions(**ON_A_GPU)
    made.set_runtime(recompute="none", fused_kernels=None)  # the others stay
    assert (made.runtime.recompute, made.runtime.fused_kernels, made.runtime.backend) == ("none", None, "triton")
    assert made.model.layers[1].recompute == "none"


@pytest.mark.parametrize("model_type", ["delta_rule", "delta_net", "kda"])
def test_a_model_with_every_option_at_its_gpu_value_loads_on_a_cpu(model_type, tmp_path):
    model, ids = tiny_named(model_type), tokens(2, 9)
    with torch.no_grad():
        expected = model(ids).logits
    model.set_runtime(**ON_A_GPU)
    model.save_pretrained(tmp_path)
    assert not runtime_options_in(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.runtime == RuntimeOptions()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected)


def runtime_options_in(folder):
    text = (folder / "config.json").read_text()
    return [name for name in (*RUNTIME_OPTIONS, *FORMER_OPTIONS, "fuse_cross_entropy") if f'"{name}"' in text]


@pytest.mark.parametrize("name", RUNTIME_KEYS)
def test_an_old_checkpoint_with_runtime_options_loads_with_one_warning(name, tmp_path):
    ids = tokens(1, 9) % 13
    with pytest.warns(UserWarning, match="which say how a model runs") as caught:
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name)
    assert len(caught) == 1
    assert all(f"{key}={value!r}" in str(caught[0].message) for key, value in RUNTIME_KEYS[name].items())
    plain = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "delta_rule_gated_deltanet")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    model.save_pretrained(tmp_path)
    assert not runtime_options_in(tmp_path)


def test_a_swapped_model_keeps_runtime_options_out_of_its_configuration(tmp_path):
    model, ids = tiny_original("llama"), tokens(1, 7)
    deltazoo.swap_attention(model, "gated_deltanet", [0, 1], backend="reference", fused_kernels=False)
    layers = [module for module in model.modules() if isinstance(module, deltazoo.DeltaRuleAttention)]
    assert [(layer.backend, layer.fused_kernels) for layer in layers] == [("reference", False)] * 2
    model.set_runtime(backend="chunkwise")
    assert [(layer.backend, layer.fused_kernels) for layer in layers] == [("chunkwise", False)] * 2
    with torch.no_grad():
        expected = model(ids).logits
    model.save_pretrained(tmp_path)
    assert not runtime_options_in(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, backend="chunkwise")
    assert loaded.runtime == RuntimeOptions(backend="chunkwise")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected)


def test_unknown_names_and_values_are_refused_and_change_nothing():
    model = tiny_model("gated_deltanet", backend="reference")
    for options, error, message in [
        ({"recompte": "none"}, TypeError, "unknown runtime option 'recompte'; did you mean 'recompute'"),
        (
            {"recompute": "elementwize"},
            ValueError,
            "unknown value 'elementwize'; did you mean 'elementwise'",
        ),
        ({"backend": "trition"}, ValueError, "backend: unknown value 'trition'; did you mean 'triton'"),
        ({"fused_kernels": 1}, ValueError, "fused_kernels must be True, False or None, got 1"),
        ({"liger": True}, TypeError, "Liger kernels left with 0.2; deltazoo's own are the default"),
    ]:
        for call in (model.set_runtime, lambda **given: DeltaRuleForCausalLM(model.config, **given)):
            with pytest.raises(error, match=message):
                call(**options)
    assert runtime_of(model)[0] == "reference" and model.runtime == RuntimeOptions(backend="reference")


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("use_cach", "use_cache"), ("tie_word_embedding", "tie_word_embeddings"), ("dtyp", "dtype")],
)
def test_a_misspelt_configuration_key_is_refused_with_the_nearest_one(misspelt, meant, tmp_path):
    tiny_model("gated_deltanet").save_pretrained(tmp_path)
    message = f"'{misspelt}'; known: backend, .*; did you mean the configuration key '{meant}'"
    with pytest.raises(TypeError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, **{misspelt: False})


def test_an_option_without_anything_to_act_on_is_refused():
    bare = tiny_model("delta_net", use_short_conv=False)
    bare.model.layers[1].attn.o_norm = deltazoo.layers.GatedRMSNorm(8, activation=torch.tanh)
    with pytest.raises(ValueError, match="the fused kernel has no activation"):
        bare.set_runtime(backend="reference", fused_kernels=True)
    assert bare.runtime == RuntimeOptions() and bare.model.layers[0].attn.backend is None
    assert bare.model.layers[0].attn.o_norm.fused is None
    swapped = tiny_original("llama")
    deltazoo.swap_attention(swapped, "delta_net")
    for model in (bare.model, AutoModelForSequenceClassification.from_config(bare.config), swapped):
        with pytest.raises(TypeError, match="unknown runtime option 'fuse_linear_cross_entropy'; .*known: backend"):
            model.set_runtime(fuse_linear_cross_entropy=True)
    with pytest.raises(TypeError, match="unknown runtime option 'recompute'; .*known: backend, fused_kernels"):
        swapped.set_runtime(recompute="block")
    with pytest.raises(TypeError, match="unknown runtime option 'fuse_linear_cross_entropy'"):
        DeltaRuleModel(bare.config, fuse_linear_cross_entropy=True)


@pytest.mark.parametrize("option", RUNTIME_OPTIONS)
def test_a_configuration_takes_no_runtime_option(option):
    with pytest.raises(ValueError, match=f"{option} says how a model runs, not what it is"):
        DeltaRuleConfig(**{option: None})
    config = tiny_config("gated_deltanet")
    with pytest.raises(AttributeError, match=rf"call model.set_runtime\({option}=...\)"):
        setattr(config, option, None)


def test_a_model_with_another_head_takes_runtime_options(tmp_path):
    tiny_named("gated_deltanet").save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, backend="reference", recompute="block")
    assert model.model.layers[0].attn.backend == "reference" and model.model.layers[0].recompute == "block"


def test_other_options_give_the_same_logits():
    ids, model = tokens(2, 9), tiny_model("hybrid")
    with torch.no_grad():
        expected = model(ids).logits
        for backend, fused in product([None, "reference", "chunkwise"], [None, False]):
            model.set_runtime(backend=backend, fused_kernels=fused)
            torch.testing.assert_close(model(ids).logits, expected)


def test_the_report_says_how_a_model_trains_and_why():
    model = tiny_model("hybrid").train()
    text = deltazoo.report(model).training
    assert "recomputed in training: none (default on cpu)" in text and "norms: plain torch (default on cpu)" in text
    assert "MLP: plain torch (default on cpu)" in text
    assert "loss in training: without the logits of all positions (default in torch.float32)" in text
    model.set_runtime(fused_kernels=True)
    assert "norms: our Triton kernel (fused_kernels=True was asked for)" in deltazoo.report(model).training
    model.set_runtime(recompute="block", fuse_linear_cross_entropy=False, fused_kernels=None)
    text = str(deltazoo.report(model))
    assert "recomputed in training: block (recompute='block' was asked for)" in text and "norms: plain torch" in text
    assert "from the logits of all positions (fuse_linear_cross_entropy=False was asked for)" in text
    model.set_runtime(fuse_linear_cross_entropy=None)
    model.lm_head = torch.nn.Linear(32, 61)
    assert "from the logits of all positions (lm_head has a bias)" in deltazoo.report(model).training
    assert "loss" not in deltazoo.report(model.model).training
    assert deltazoo.report(torch.nn.Linear(2, 2)).training is None
