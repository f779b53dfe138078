"""Models of ours as checkpoints of transformers' model types and of fla-hub, and back."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fresh_process import run_well_after_transformers
from safetensors.torch import load_file, save_file
from tiny_models import HYBRID, SIZES, tiny_named, tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import deltazoo
from deltazoo.compat import load_native_checkpoint
from deltazoo.compat.native import checkpoints
from deltazoo.compat.native.formats import FORMATS, TARGETS, targets_of
from deltazoo.models import DeltaRuleForCausalLM
from deltazoo.training.config import TokenizerConfig
from deltazoo.training.tokens import build_tokenizer

GROUPED = {"num_v_heads": 4, "expand_v": 1.5, "conv_size": 3}
NORMED = {**HYBRID, "softmax_qk_norm": True, "expand_v": 2.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo": ("olmo_hybrid", {"mixer": "gated_deltanet", "norm_eps": 1e-5, **GROUPED}),
    "olmo, negative eigenvalues": ("olmo_hybrid", {"mixer": "neg_gated_deltanet", "norm_eps": 1e-5}),
    "qwen3_5": ("qwen3_5_text", {"mixer": "gated_deltanet", **GROUPED}),
    "qwen3_5, tied": ("qwen3_5_text", {"mixer": "gated_deltanet", "tie_word_embeddings": True}),
    "qwen3_5, hybrid": ("qwen3_5_text", {"mixer": "gated_deltanet", **NORMED}),
    "qwen3_next": ("qwen3_next", {"mixer": "gated_deltanet", **GROUPED}),
    "qwen3_next, hybrid": ("qwen3_next", {"mixer": "gated_deltanet", **NORMED}),
    "kimi": ("kimi_linear", {"mixer": "kda", "gate_bias": False, "norm_eps": 1e-5}),
}
RUNS = {"qwen3_5_text", "qwen3_next", *(name for name in FORMATS if transformers.__version__ >= "5.20")}
"""Targets that the installed transformers has and can run: its first OLMo Hybrid fails with its own cache."""


def tiny(**values: Any) -> DeltaRuleForCausalLM:
    """A model whose norms and biases differ from their first values."""
    model = tiny_named("delta_rule", **values)
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim == 1:
                x.add_(torch.rand_like(x) * 0.3)
    return model.eval()


def case_of(name: str) -> tuple[str, DeltaRuleForCausalLM]:
    target, values = CASES[name]
    if target not in RUNS:
        pytest.skip(f"transformers {transformers.__version__} has no {target}, or none that runs")
    return target, tiny(**values)


def logits_of(model: Any, given: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(given).logits


@pytest.mark.parametrize("name", CASES)
def test_transformers_alone_computes_an_exported_model_and_it_comes_back_equal_to_the_bit(name, tmp_path):
    target, model = case_of(name)
    found = deltazoo.export(model, target, tmp_path / "out")
    assert found.difference <= 1e-4 * max(1, found.largest) and found.new_tokens == 16

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(loaded).__module__.startswith("transformers.models.") and loaded.config.model_type == target
    given = tokens(2, 70)
    torch.testing.assert_close(logits_of(loaded, given), logits_of(model, given), rtol=0, atol=2e-4)

    back = load_native_checkpoint(tmp_path / "out")
    assert back.config.model_type == FORMATS[target].rules[0]
    assert {**back.state_dict()}.keys() == model.state_dict().keys()
    assert all(torch.equal(x, model.state_dict()[key]) for key, x in back.state_dict().items())
    assert torch.equal(logits_of(back.eval(), given), logits_of(model, given))


def test_a_process_without_deltazoo_loads_it(tmp_path):
    target, model = case_of("qwen3_5")
    deltazoo.export(model, target, tmp_path / "out", check=False)
    given = tokens(2, 70)
    torch.save(given, tmp_path / "given.pt")
    run_well_after_transformers(
        "import sys, torch; from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r})\n"
        f"logits = model(torch.load({str(tmp_path / 'given.pt')!r})).logits\n"
        f"torch.save(logits.detach(), {str(tmp_path / 'logits.pt')!r}); assert 'deltazoo' not in sys.modules"
    )
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), logits_of(model, given), rtol=0, atol=2e-4)


def test_weights_of_half_precision_stay_what_they_are(tmp_path):
    """A norm's distance from one would round in bfloat16, so it is stored in float32."""
    _, model = case_of("qwen3_5")
    with torch.no_grad():
        model.model.norm.weight.fill_(0.1)
    model = model.bfloat16()
    for layer in model.model.layers:
        layer.attn.A_log.data, layer.attn.dt_bias.data = layer.attn.A_log.float(), layer.attn.dt_bias.float()
    deltazoo.export(model, "qwen3_5_text", tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert saved["model.norm.weight"].dtype == saved["model.layers.0.linear_attn.A_log"].dtype == torch.float32
    assert saved["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    back = load_native_checkpoint(tmp_path / "out")
    assert back.dtype == torch.bfloat16
    assert all(torch.equal(x, model.state_dict()[key]) for key, x in back.state_dict().items())


@pytest.mark.parametrize(
    ("values", "model_type"),
    [
        ({"mixer": "neg_gated_deltanet"}, "gated_deltanet"),
        ({"mixer": "neg_delta_net"}, "delta_net"),
        ({"mixer": "kda", "gate_bias": False}, "kda"),
        ({"mixer": "gla", **HYBRID}, "gla"),
    ],
    ids=str,
)
def test_fla_gets_its_own_model_type_of_a_rule(values, model_type, tmp_path):
    model = tiny(**values)
    assert deltazoo.export(model, "fla", tmp_path / "out").difference == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == model_type
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(loaded, tokens(2, 9)), logits_of(model, tokens(2, 9)))


@pytest.mark.parametrize(
    ("target", "values", "message"),
    [
        ("olmo_hybrid", {"mixer": "gated_deltanet"}, r"norm_eps=1e-06, but .*\(norm_eps=1e-05\)"),
        ("olmo_hybrid", {"mixer": "neg_gated_deltanet", "norm_eps": 1e-5, "neg_eigval": "erase"}, "neg_eigval='erase'"),
        ("olmo_hybrid", {"mixer": "kda"}, "computes gated_deltanet and neg_gated_deltanet, and .* rule is 'kda'"),
        ("olmo_hybrid", {**HYBRID, "norm_eps": 1e-5}, "layer_types names full_attention, but its softmax blocks have"),
        ("qwen3_5_text", HYBRID, "softmax_qk_norm=False, but its softmax layers normalise"),
        ("qwen3_5_text", {**HYBRID, "softmax_qk_norm": True, "qkv_bias": True}, "qkv_bias=True"),
        ("qwen3_5_text", {"allow_neg_eigval": True}, "allow_neg_eigval=True, but its step sizes end at 1"),
        ("qwen3_next", {"beta_bias": True, "use_gate": False}, "use_gate=False.*; beta_bias=True"),
        ("qwen3_next", {"num_micro_steps": 2}, "num_micro_steps=2"),
        ("qwen3_next", {"use_short_conv": False}, "use_short_conv=False"),
        ("qwen3_next", {**HYBRID, "layer_types": ["full_attention"] * 2, "softmax_qk_norm": True}, "no linear_att"),
        ("kimi_linear", {"mixer": "kda"}, r"gate_bias=True, but its output gate has no bias \(gate_bias=False\)"),
        ("kimi_linear", {"mixer": "kda", "gate_bias": False, "expand_v": 2.0}, "expand_v=2.0"),
        ("kimi_linear", {"mixer": "kda", "gate_bias": False, "num_v_heads": 4}, r"num_v_heads=4.*\(num_v_heads=2\)"),
        ("kimi_linear", {"mixer": "kda", "gate_bias": False, "decay_lower_bound": -5.0}, "decay_lower_bound=-5.0"),
        ("fla", {"mixer": "longhorn"}, "flash-linear-attention has no model type for the rule 'longhorn'"),
        ("fla", {"mixer": "gated_deltanet", "beta_bias": True}, "beta_bias=True"),
        ("fla", {**HYBRID, "softmax_qk_norm": True}, "softmax_qk_norm=True"),
        ("fla", {**HYBRID, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters="),
        ("qwen3_5", {}, "unknown target 'qwen3_5'; did you mean 'qwen3_5_text'"),
    ],
    ids=str,
)
def test_keys_in_the_way_are_named(target, values, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        deltazoo.export(tiny(**values), target, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_comparison_sees_what_the_table_does_not_and_nothing_is_left(tmp_path, monkeypatch):
    target, _ = case_of("qwen3_5")
    known = FORMATS[target]
    constants = {**known.constants, "rms_norm_eps": 1e-2}
    monkeypatch.setitem(FORMATS, target, replace(known, constants=constants))
    with pytest.raises(ValueError, match=r"logits differ from the original's by .*, so nothing was written"):
        deltazoo.export(tiny(), target, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    assert deltazoo.export(tiny(), target, tmp_path / "out", check=False) is None
    assert (tmp_path / "out" / "config.json").is_file()


def test_only_a_new_or_an_empty_folder_is_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="exists and is no empty folder: name a new one"):
            deltazoo.export(tiny(), "fla", path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    deltazoo.export(tiny(), "fla", tmp_path / "empty", check=False)
    deltazoo.export(tiny(), "fla", tmp_path / "new" / "nested", check=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "new"]


def test_other_models_are_refused(tmp_path):
    for model in (nn.Linear(2, 2), tiny().model):
        with pytest.raises(TypeError, match=f"a causal language model of deltazoo, got {type(model).__name__}"):
            deltazoo.export(model, "fla", tmp_path / "out")
    undescribed = tiny()
    undescribed.model.layers[0].attn.allow_neg_eigval = True
    with pytest.raises(ValueError, match="has allow_neg_eigval=True, and the configuration would load"):
        deltazoo.export(undescribed, "fla", tmp_path / "out")


def test_a_target_that_transformers_lacks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "CONFIG_MAPPING", {})
    with pytest.raises(ValueError, match=f"transformers {transformers.__version__}.* has no model type qwen3_next"):
        deltazoo.export(tiny(), "qwen3_next", tmp_path / "out")


def test_a_target_that_transformers_cannot_run_is_refused(tmp_path, monkeypatch):
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise AttributeError("no such cache")

    monkeypatch.setattr(module.Qwen3NextModel, "forward", fails)
    with pytest.raises(ValueError, match="cannot run its own qwen3_next, .* AttributeError: no such cache"):
        deltazoo.export(tiny(), "qwen3_next", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_kernels_that_a_cpu_cannot_run_are_left_out_of_the_comparison(tmp_path, monkeypatch):
    """Where flash-linear-attention is installed, transformers calls its kernels on every device."""
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    original = module.torch_chunk_gated_delta_rule
    if not hasattr(original, "__wrapped__"):
        pytest.skip(f"transformers {transformers.__version__} chooses kernels in another way")

    @functools.wraps(original)
    def kernel(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("needs a GPU")

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", kernel)
    assert deltazoo.export(tiny(), "qwen3_next", tmp_path / "out").difference < 1e-4
    assert module.torch_chunk_gated_delta_rule is kernel


def test_tokenizer_and_generation_config_go_along(tmp_path, monkeypatch):
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), [])
    model = tiny(vocab_size=len(tokenizer))
    model.generation_config.do_sample, model.generation_config.temperature = True, 0.7
    deltazoo.export(model, "qwen3_next", tmp_path / "out", tokenizer=tokenizer, check=False)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.7
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("def f()").input_ids == tokenizer("def f()").input_ids

    other = build_tokenizer(TokenizerConfig(kind="byte"), [])
    other.add_tokens(["def"])
    monkeypatch.setattr(checkpoints.AutoTokenizer, "from_pretrained", lambda folder: other)
    with pytest.raises(ValueError, match=r"loads a \w+ with every checkpoint of qwen3_next, which splits text"):
        deltazoo.export(model, "qwen3_next", tmp_path / "second", tokenizer=tokenizer, check=False)
    assert not (tmp_path / "second").exists()


def native(target: str, **values: Any) -> Any:
    """A small model of transformers' own, all of whose parameters are drawn."""
    if target not in RUNS:
        pytest.skip(f"transformers {transformers.__version__} has no {target}, or none that runs")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(target, **values)).eval()


QWEN = {
    **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "layer_types": HYBRID["layer_types"],
}


def test_a_pure_model_of_transformers_loads_as_ours(tmp_path):
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")}
    linear = {"layer_types": ["linear_attention"] * 2, "mlp_layer_types": ["dense"] * 2}
    heads = {"linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 4}
    model = native("kimi_linear", **sizes, **linear, **heads, pad_token_id=None, initializer_range=0.2)
    model.save_pretrained(tmp_path)
    ours = load_native_checkpoint(tmp_path).eval()
    assert ours.config.model_type == "kda" and ours.config.layer_types == linear["layer_types"]
    given = tokens(2, 70)
    with torch.no_grad():
        theirs = model(given, use_cache=False).logits  # a cache of theirs wants a softmax layer
    torch.testing.assert_close(logits_of(ours, given), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("target", "values", "message"),
    [
        ("qwen3_5_text", QWEN, "softmax layers of this model gate their output"),
        ("qwen3_5_text", {**QWEN, "attention_bias": True}, "with attention_bias=True, only with False"),
        ("qwen3_5_text", {**QWEN, "head_dim": 16}, "with head_dim=16, only with 8"),
        ("qwen3_next", {**QWEN, "num_experts": 2, "num_experts_per_tok": 1}, "with num_experts=2, only with 0"),
        (
            "olmo_hybrid",
            {**QWEN, "pad_token_id": None, "rms_norm_eps": 1e-5},
            "the softmax layers of olmo_hybrid: its softmax blocks have their norms behind",
        ),
    ],
    ids=str,
)
def test_checkpoints_that_our_layers_do_not_compute_are_refused(target, values, message, tmp_path):
    native(target, **values).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_native_checkpoint(tmp_path)


def change_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    out = tmp_path / "out"
    deltazoo.export(tiny(), "qwen3_next", out, check=False)
    change_weights(out, lambda weights: weights.update({"model.layers.0.linear_attn.extra": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"do not compute all of this qwen3_next: .* holds .*linear_attn.extra"):
        load_native_checkpoint(out)
    change_weights(out, lambda weights: [weights.pop(k) for k in list(weights) if "extra" in k or "out_proj" in k])
    with pytest.raises(ValueError, match=r"lacks weights of its model: model.layers.0.linear_attn.out_proj.weight"):
        load_native_checkpoint(out)
    tiny().save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=r"model type 'delta_rule' in .* is none of olmo_hybrid, "):
        load_native_checkpoint(tmp_path / "ours")


def test_the_rules_say_where_they_can_go():
    assert targets_of("gated_deltanet") == [
        "olmo_hybrid (norm_eps=1e-5)",
        "qwen3_5_text (softmax_qk_norm=True in hybrids)",
        "qwen3_next (softmax_qk_norm=True in hybrids)",
        "fla",
    ]
    assert targets_of("kda") == ["kimi_linear (gate_bias=False)", "fla"]
    assert targets_of("longhorn") == []
    named = {target.partition(" ")[0] for rule in deltazoo.list_rules() for target in targets_of(rule)}
    assert named == {*TARGETS}
