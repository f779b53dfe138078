"""Switching a model over and back: per instance, exactly undone, copied, pickled, saved, hooked, adapted, compiled."""

from __future__ import annotations

import copy
import io
import pickle
import re
import sys
from pathlib import Path

import accelerate as hf_accelerate
import pytest
import torch
import transformers
from foreign_models import FUSED, INSTALLED, accelerated, foreign_model, mixer_of, tokens
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import StaticCache

import deltazoo
from deltazoo.compat.transformers.arrangements import LAYER_ARRANGEMENTS


def logits(model, ids=None, **kwargs):
    with torch.no_grad():
        return model(input_ids=tokens(2, 9) if ids is None else ids, use_cache=False, **kwargs).logits


@pytest.fixture
def model():
    return foreign_model("qwen3_next")


def uses_our_operator(model, monkeypatch) -> bool:
    calls = []
    module = sys.modules["deltazoo.layers.rule"]
    rule = module.delta_rule
    monkeypatch.setattr(module, "delta_rule", lambda *args, **kwargs: calls.append(1) or rule(*args, **kwargs))
    logits(model)
    monkeypatch.undo()
    return bool(calls)


@pytest.mark.parametrize("family", FUSED)
def test_restore_undoes_it_exactly(family, monkeypatch):
    model = foreign_model(family)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    classes = {name: type(module) for name, module in model.named_modules()}
    expected, keys = logits(model), list(model.state_dict())
    parameters = {name: id(p) for name, p in model.named_parameters()}

    report = deltazoo.accelerate(model)
    assert [layer.rule for layer in report.layers] == [LAYER_ARRANGEMENTS[type(mixer_of(model)).original.__name__].rule]
    assert report == deltazoo.report(model)
    assert list(model.state_dict()) == keys
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert isinstance(mixer_of(model), classes[next(n for n, m in model.named_modules() if m is mixer_of(model))])
    assert uses_our_operator(model, monkeypatch)

    model.generate(tokens(1, 3), max_new_tokens=2, pad_token_id=0)
    deltazoo.restore(model)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(logits(model), expected)
    assert not uses_our_operator(model, monkeypatch)


def test_every_delta_rule_model_of_the_installed_version_is_known():
    folder = Path(transformers.__file__).parent / "models"
    rule = re.compile(r'"(chunk_gated_delta_rule|chunk_kda)"|import chunk_gated_delta_rule')
    found = {path.parent.name for path in folder.glob("*/modeling_*.py") if rule.search(path.read_text("utf-8"))}
    assert found == set(INSTALLED) <= {arrangement.family for arrangement in LAYER_ARRANGEMENTS.values()}


@pytest.mark.skipif("olmo_hybrid" in FUSED, reason="this version of transformers has OLMo Hybrid's newer arrangement")
def test_an_older_arrangement_is_refused():
    with pytest.raises(ValueError, match="accelerating it needs a newer version"):
        deltazoo.accelerate(foreign_model("olmo_hybrid"))


def test_other_instances_are_left_alone(model, monkeypatch):
    other = foreign_model("qwen3_next")
    deltazoo.accelerate(model)
    assert not uses_our_operator(other, monkeypatch)


def test_twice_changes_the_backend(model):
    deltazoo.accelerate(model)
    expected = logits(model)
    hooks = [*model.model._forward_pre_hooks.values(), *model.model._forward_hooks.values()]
    (layer,) = deltazoo.accelerate(model, backend="reference").layers
    assert layer.backend == "reference"
    assert [*model.model._forward_pre_hooks.values(), *model.model._forward_hooks.values()] == hooks
    torch.testing.assert_close(logits(model), expected)
    deltazoo.restore(model)
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks


@pytest.mark.parametrize("dispatched", [False, True], ids=["plain", "offloaded"])
def test_copies_and_pickles(model, dispatched, monkeypatch):
    deltazoo.accelerate(model)
    if dispatched:
        model = hf_accelerate.cpu_offload(model, execution_device="cpu")
    expected = logits(model)
    copies = [copy.deepcopy(model)]
    if not dispatched:  # accelerate's hooks hold local functions, which cannot be pickled with or without us
        copies.append(pickle.loads(pickle.dumps(model)))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies.append(torch.load(buffer, weights_only=False))
    for other in copies:
        assert type(other) is type(model)
        assert torch.equal(logits(other), expected)
        assert uses_our_operator(other, monkeypatch)
        deltazoo.restore(other)
        assert not uses_our_operator(other, monkeypatch)


def test_saved_files_are_the_models_own(model, tmp_path):
    expected = copy.deepcopy(model.state_dict())
    deltazoo.accelerate(model)
    model.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).architectures == ["Qwen3NextForCausalLM"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [type(module) for module in loaded.modules()] == [
        type(module) for module in foreign_model("qwen3_next").modules()
    ]
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in loaded.state_dict().items())


@pytest.mark.parametrize("first", ["hooks", "ours"])
def test_offloading_hooks_of_accelerate(model, first, monkeypatch):
    deltazoo.accelerate(model)
    expected = logits(model)
    deltazoo.restore(model)
    original = logits(model)
    if first == "ours":
        deltazoo.accelerate(model)
    hf_accelerate.cpu_offload(model, execution_device="cpu")
    if first == "hooks":
        deltazoo.accelerate(model)
    assert mixer_of(model).conv1d.weight.device.type == "meta"
    assert deltazoo.report(model).layers[0].reason.endswith("not on cpu"), "it runs on the CPU, not on meta"
    assert torch.equal(logits(model), expected)
    assert uses_our_operator(model, monkeypatch)
    deltazoo.restore(model)
    assert torch.equal(logits(model), original)
    hf_accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert not uses_our_operator(model, monkeypatch)


def test_device_map(model, tmp_path):
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, device_map={"": "cpu"})
    expected = logits(model)
    deltazoo.accelerate(model)
    torch.testing.assert_close(logits(model), expected)


def test_lora_acts_and_trains(model):
    model = get_peft_model(model, LoraConfig(target_modules=["in_proj_qkvz", "out_proj"], r=2, init_lora_weights=False))
    expected = logits(model)
    deltazoo.accelerate(model)
    torch.testing.assert_close(logits(model), expected)
    model(input_ids=tokens(2, 9), labels=tokens(2, 9), use_cache=False).loss.backward()
    assert all(
        p.grad is not None and p.grad.any() for n, p in model.named_parameters() if "linear_attn" in n and "lora" in n
    )
    with model.disable_adapter():
        assert not torch.allclose(logits(model), expected)


def test_compiled_without_graph_breaks():
    model = accelerated("qwen3_5")
    positions = torch.cat([torch.arange(5), torch.arange(4)]).expand(2, -1)
    expected, packed = logits(model), logits(model, position_ids=positions)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled), expected)
    torch.testing.assert_close(logits(compiled, position_ids=positions), packed)


def test_compiled_steps_on_a_static_cache_are_traced_once(model):
    model.config.get_text_config().mlp_only_layers = [0, 1]  # transformers' experts on a CPU cannot be traced whole
    model = type(model)(model.config).eval()
    deltazoo.accelerate(model)
    ids = tokens(2, 12)
    expected = logits(model, ids)
    cache, graphs = StaticCache(config=model.config, max_cache_len=16), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    step = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        outputs = [model(input_ids=ids[:, :5], past_key_values=cache).logits]
        for t in range(5, 12):
            position_ids = torch.full((1, 1), t)
            outputs.append(step(input_ids=ids[:, t : t + 1], past_key_values=cache, position_ids=position_ids).logits)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected)
    assert len(graphs) == 1


class TestErrors:
    def test_nothing_to_accelerate(self):
        with pytest.raises(
            ValueError, match=r"Linear has no delta-rule layer of transformers; known: qwen3_next \(Qwen3"
        ):
            deltazoo.accelerate(nn.Linear(2, 2))

    def test_nothing_to_restore(self, model):
        with pytest.raises(ValueError, match="has no accelerated layer to restore"):
            deltazoo.restore(model)

    def test_a_layer_without_its_model(self, model):
        with pytest.raises(ValueError, match="Qwen3NextGatedDeltaNet is in no transformers model"):
            deltazoo.accelerate(mixer_of(model))

    @pytest.mark.parametrize(
        ("backend", "error", "message"),
        [
            ("tritn", ValueError, "unknown backend 'tritn'; did you mean 'triton'"),
            ("triton", NotImplementedError, "the triton backend cannot run this call"),
        ],
    )
    def test_a_backend_that_cannot(self, model, backend, error, message):
        with pytest.raises(error, match=message):
            deltazoo.accelerate(model, backend=backend)
        self.assert_untouched(model)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda layer: setattr(layer, "activation", "gelu"), "uses SiLU, but the layer has activation 'gelu'"),
            (lambda layer: setattr(layer.conv1d, "bias", nn.Parameter(torch.zeros(64))), "our convolution has no bias"),
            (lambda layer: setattr(layer, "forward", lambda *_, **__: None), "its forward has been replaced by"),
        ],
        ids=["activation", "bias", "forward"],
    )
    def test_layers_that_are_not_as_they_should_be(self, model, change, message):
        change(mixer_of(model))
        with pytest.raises(ValueError, match=message):
            deltazoo.accelerate(model)
        self.assert_untouched(model)

    @staticmethod
    def assert_untouched(model):
        assert type(mixer_of(model)).__name__ == "Qwen3NextGatedDeltaNet"
        assert not model.model._forward_pre_hooks
