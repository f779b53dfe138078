"""Saving and loading swapped models, with any head, in any process, and properties of their classes."""

import copy
import json
import pickle

import pytest
import torch
from fresh_process import run_well_after_transformers
from helpers import run_python
from tiny_families import OWN, swapped, tiny_original, tokens
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import deltazoo
from deltazoo.swap import swapped_layers

LOAD = """
import sys, torch
import deltazoo
assert "transformers" not in sys.modules
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.load(sys.argv[2])
with torch.no_grad():
    assert torch.equal(model(ids["tokens"]).logits, ids["logits"])
print(type(model).__name__, sorted(deltazoo.swap.swapped_layers(model)))
"""
UNPICKLE = """
import sys, torch, deltazoo
for config, model, ids, logits in torch.load(sys.argv[1], weights_only=False):
    assert type(model).config_class is type(config) is type(model.config)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
model.save_pretrained(sys.argv[2])
"""
WITHOUT_DELTAZOO = """
import sys
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    print(error)
"""


def test_a_fresh_process_loads_it_after_importing_deltazoo(tmp_path):
    model, ids = swapped("qwen3", [0, 2]), tokens(2, 6)
    model.save_pretrained(tmp_path)
    torch.save({"tokens": ids, "logits": model(ids).logits.detach()}, tmp_path / "expected.pt")
    printed = run_python(LOAD, str(tmp_path), str(tmp_path / "expected.pt"))
    assert printed.strip() == "DeltazooQwen3ForCausalLM [0, 2]"


def test_a_fresh_process_unpickles_models_and_configurations(tmp_path):
    """Spawned processes and `torch.load` of a whole model; the classes are made when they are first named."""
    models, ids = [swapped(family, [0, 2]) for family in OWN], tokens(2, 6)
    with torch.no_grad():
        torch.save([(model.config, model, ids, model(ids).logits) for model in models], tmp_path / "models.pt")
    run_well_after_transformers(UNPICKLE, str(tmp_path / "models.pt"), str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded(ids).logits, models[-1](ids).logits)


def test_only_classes_of_known_families_are_made():
    for name in ("DeltazooMambaConfig", "DeltazooMambaForCausalLM", "DeltazooNothing", "Nothing"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(deltazoo.swap.models, name)


def test_plain_transformers_does_not_start_attention_afresh(tmp_path):
    swapped("llama").save_pretrained(tmp_path)
    assert "deltazoo_llama" in run_well_after_transformers(WITHOUT_DELTAZOO, str(tmp_path))


def test_remote_code_is_refused_with_what_to_do_instead(tmp_path):
    with pytest.raises(ValueError, match="save without it, and import deltazoo in the process that loads"):
        swapped("llama").save_pretrained(tmp_path / "saved", remote_code=True)
    assert not (tmp_path / "saved").exists()
    swapped("llama").save_pretrained(tmp_path / "saved", remote_code=False)
    assert AutoConfig.from_pretrained(tmp_path / "saved").model_type == "deltazoo_llama"


def test_the_configuration_records_every_layer(tmp_path):
    model = swapped("llama", [1, 3], "kda", conv_size=3, allow_neg_eigval=True, rope=False)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "deltazoo_llama" and saved["architectures"] == ["DeltazooLlamaForCausalLM"]
    assert set(saved["delta_layers"]) == {"1", "3"}
    recorded = saved["delta_layers"]["3"]
    assert recorded["variant"] == "kda" and recorded["num_heads"] == 4 and recorded["head_dim"] == 8
    assert recorded["conv_size"] == 3 and recorded["allow_neg_eigval"] and not recorded["rope"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict() | {
        key: loaded.config.to_dict()[key] for key in ("dtype", "architectures", "transformers_version")
    }
    assert [layer.delta.conv_size for layer in swapped_layers(loaded).values()] == [3, 3]


def test_sharded_and_saved_again(tmp_path):
    model, ids = swapped("granite"), tokens(2, 6)
    model.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")(ids).logits
        assert torch.equal(again, model(ids).logits)


HEADS = [AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering]


@pytest.mark.parametrize("auto_class", HEADS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_base_model_and_heads(family, auto_class, tmp_path):
    model, ids = swapped(family, auto_class=auto_class), tokens(2, 6)
    model.save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    with torch.no_grad():
        expected, actual = model(ids), loaded(ids)
    assert torch.equal(expected[0], actual[0])
    deltazoo.swap_attention(copied := tiny_original(family, auto_class), "delta_net", keep_teacher=True)
    copied.save_pretrained(tmp_path / "copied")
    deltazoo.unswap_attention(copied)
    assert type(copied) is type(tiny_original(family, auto_class))
    assert copied.config.architectures == [type(copied).__name__]


def test_base_model_loads_from_a_causal_lm(tmp_path):
    model, ids = swapped("mistral"), tokens(2, 6)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, model.base_model(ids).last_hidden_state)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_saved_as_the_original_saves_them(family, tmp_path):
    """Checkpoints hold one matrix per expert, models one tensor for all: the original's conversion comes along."""
    original, model = tiny_original(family), swapped(family)
    original.save_pretrained(tmp_path / "original")
    model.save_pretrained(tmp_path / "swapped")

    def expert_names(path):
        from safetensors import safe_open

        with safe_open(path / "model.safetensors", "pt") as file:
            return {name for name in file.keys() if "experts" in name}  # noqa: SIM118

    assert expert_names(tmp_path / "original") == expert_names(tmp_path / "swapped")
    assert len(expert_names(tmp_path / "original")) >= 4 * 4 * 3


def test_models_made_from_a_configuration_start_afresh():
    config = swapped("llama").config
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    assert type(model).__name__ == "DeltazooLlamaForCausalLM" and list(swapped_layers(model)) == [0, 2]
    assert model(tokens(1, 5)).logits.isfinite().all()


def test_a_configuration_without_layers_is_refused():
    with pytest.raises(ValueError, match="DeltazooLlamaConfig without delta_layers describes no model"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model("deltazoo_llama", num_hidden_layers=1, hidden_size=32))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_decay_gates_stay_float32(family, tmp_path):
    model = swapped(family, rule="kda").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    for m in (model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        for layer in swapped_layers(m).values():
            assert layer.delta.A_log.dtype == layer.delta.dt_bias.dtype == torch.float32
            assert layer.delta.q_proj.weight.dtype == torch.bfloat16
        assert m(tokens(1, 5)).logits.isfinite().all()


def test_copies_and_pickles():
    ids, original = tokens(1, 5), tiny_original("llama")
    model = copy.deepcopy(original)
    deltazoo.swap_attention(model, "gated_deltanet", keep_teacher=True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        with torch.no_grad():
            assert torch.equal(twin(ids).logits, model(ids).logits)
            deltazoo.unswap_attention(twin)
            assert torch.equal(twin(ids).logits, original(ids).logits)
        assert not twin.model._forward_pre_hooks and model.model._forward_pre_hooks


class TestWhatTheClassesPromise:
    @pytest.mark.parametrize("family", OWN)
    @pytest.mark.parametrize("layers", [[0], "all"])
    def test_every_entry_of_the_tensor_parallel_plan_has_a_module(self, family, layers):
        original, model = tiny_original(family), swapped(family, layers)
        names = ["." + name for name, _ in [*model.named_modules(), *model.named_parameters()]]
        generic = {".".join("*" if part.isdigit() else part for part in name.split("."))[1:] for name in names}
        assert set(model._tp_plan) <= generic
        dropped = set(original._tp_plan) - set(model._tp_plan)
        original_generic = {
            ".".join("*" if p.isdigit() else p for p in n.split(".")) for n, _ in original.named_modules()
        }
        assert not {entry for entry in dropped if entry in generic}
        assert not any(".delta." in entry for entry in model._tp_plan)
        if layers == [0]:
            assert not dropped & original_generic

    def test_no_context_parallelism_of_transformers(self):
        original, model = tiny_original("llama"), swapped("llama")
        assert not model._supports_context_parallel
        if hasattr(original, "supports_context_parallel"):  # transformers 5.17
            assert original.supports_context_parallel and not model.supports_context_parallel
        assert model._no_split_modules == original._no_split_modules

    def test_what_quantisers_and_half_precision_leave_alone(self, tmp_path):
        model = swapped("llama")
        assert model._keep_in_fp32_modules_strict == {"A_log", "dt_bias"} and not model._keep_in_fp32_modules
        config = copy.deepcopy(model.config)
        config.quantization_config = {"quant_method": "torchao"}  # set by from_pretrained before the model is made
        left_alone = AutoModelForCausalLM.from_config(config)._keep_in_fp32_modules
        assert {name.rsplit(".", 1)[1] for name in left_alone} == {"a_proj", "b_proj"}
        assert {f"model.layers.{index}.self_attn.delta.a_proj" for index in swapped_layers(model)} <= left_alone
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
        delta = swapped_layers(loaded)[0].delta
        assert (delta.b_proj.weight.dtype, delta.A_log.dtype) == (torch.float16, torch.float32)
