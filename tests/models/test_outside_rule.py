"""A rule in a file outside the package, with a layer that owns a parameter: from the layer to a checkpoint and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import run_well_after_transformers
from helpers import run_python
from outside_rule import RULES, trapezoid  # noqa: F401  (a fixture)
from tiny_models import HYBRID, SIZES, tokens
from torch.testing import assert_close

import deltazoo
from deltazoo.layers import (
    DeltaRuleAttention,
    LayerInput,
    LayerStates,
    layer_class,
    make_layer,
    parameter_groups,
    parameters_without_decay,
)
from deltazoo.layers.layer_options import check_shares
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM
from deltazoo.ops import delta_rule
from deltazoo.spec import get_rule, register_rule

pytestmark = pytest.mark.usefixtures("trapezoid")
EXACT: dict[str, float] = {"rtol": 0, "atol": 1e-12}


def outside_layer(**options: Any) -> DeltaRuleAttention:
    layer = make_layer("trapezoid", 24, 2, 8, num_v_heads=4, initializer_range=0.5, layer_idx=0, **options)
    return layer.double()


def outside_model(**keys: Any) -> DeltaRuleForCausalLM:
    torch.manual_seed(1)
    model = DeltaRuleForCausalLM(DeltaRuleConfig(**{**SIZES, "mixer": "trapezoid", **keys})).eval()
    for layer in model.modules():
        if hasattr(layer, "log_time"):
            torch.nn.init.uniform_(layer.log_time, 0, 2)  # different in every head
            torch.nn.init.normal_(layer.time_proj.weight)
    return model


def test_the_registry_gives_the_class_and_the_base_class_refuses() -> None:
    layer = outside_layer()
    assert type(layer) is layer_class("trapezoid") is layer_class(get_rule("trapezoid"))
    assert type(layer).__module__ == "trapezoid"
    assert layer_class("kda") is DeltaRuleAttention
    with pytest.raises(ValueError, match="'trapezoid' is computed by TrapezoidAttention, got DeltaRuleAttention"):
        DeltaRuleAttention("trapezoid", 24, 2, 8)


def test_the_layer_computes_the_rule_as_written() -> None:
    layer, x = outside_layer(), torch.randn(2, 30, 24, dtype=torch.float64)
    torch.nn.init.uniform_(layer.log_time, 0, 2)
    q, k = torch.randn(2, 30, 2, 8, dtype=torch.float64), 2 * torch.randn(2, 30, 2, 8, dtype=torch.float64)
    v = torch.randn(2, 30, 4, 8, dtype=torch.float64)
    torch.nn.init.normal_(layer.time_proj.weight)
    inputs = layer.rule_inputs(LayerInput(x, layer), q, k, v)
    b = (layer.log_time + torch.tanh(layer.time_proj(x))).exp() * torch.sigmoid(layer.b_proj(x))
    squared_norm = k.square().sum(-1).repeat_interleave(2, dim=2)
    assert inputs.beta is not None
    # The eigenvalue along the key is that of the trapezoidal rule.
    assert_close(1 - inputs.beta * squared_norm, (1 - b * squared_norm / 2) / (1 + b * squared_norm / 2), **EXACT)
    chunked, looped = (delta_rule(*inputs[:5], backend=backend).output for backend in ("chunkwise", "reference"))
    assert_close(chunked, looped, **EXACT)


def test_the_layer_is_the_same_in_one_piece_in_steps_padded_and_packed() -> None:
    layer, states, x = outside_layer(), LayerStates(), torch.randn(2, 70, 24, dtype=torch.float64)
    with torch.no_grad():
        whole = layer(x)
        stepped = torch.cat([layer(part, past_key_values=states) for part in x.split(1, dim=1)], dim=1)
        mask = torch.ones(2, 70, dtype=torch.bool)
        mask[0, :20] = False
        padded = layer(x, attention_mask=mask)
        packed = layer(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, 70, 140])).view_as(x)
        assert_close(padded[0, 20:], layer(x[:1, 20:])[0], **EXACT)
    assert_close(stepped, whole, **EXACT)
    assert_close(packed, whole, **EXACT)


def test_the_layers_own_parameter_is_filled_kept_wide_and_spared() -> None:
    with torch.device("meta"):
        model = DeltaRuleForCausalLM(DeltaRuleConfig(**SIZES, mixer="trapezoid"))
    model = model.to_empty(device="cpu")
    model.initialize_weights()
    layer = model.model.layers[0].attn
    assert (layer.log_time == 1).all() and (layer.time_proj.weight == 0).all() and (layer.log_clock == 0).all()
    model.bfloat16()
    assert layer.log_time.dtype == torch.float32 and layer.q_proj.weight.dtype == torch.bfloat16
    own = {f"model.layers.{i}.attn.{name}" for i in (0, 1) for name in ("log_time", "log_clock")}
    assert {name for name in parameters_without_decay(model) if "attn.log_" in name} == own
    decaying, constant = ({id(p) for p in group["params"]} for group in parameter_groups(model, 0.1))
    assert {id(model.get_parameter(name)) for name in own} <= constant and id(layer.time_proj.weight) in decaying
    # transformers' Trainer looks for names with "bias" in them.
    assert all("bias" in name.lower() for name in layer._parameters if name == "log_time")


@pytest.mark.parametrize("keys", [{}, HYBRID], ids=["pure", "hybrid"])
def test_a_model_goes_padded_packed_generating_and_through_a_checkpoint(keys: dict[str, Any], tmp_path: Path) -> None:
    model, x = outside_model(**keys), tokens(2, 12)
    with torch.no_grad():
        logits = model(x).logits
        mask = torch.ones_like(x)
        mask[0, :5] = 0
        assert_close(model(x, attention_mask=mask).logits[0, 5:], model(x[:1, 5:]).logits[0])
        packed = model(x.reshape(1, -1), position_ids=torch.arange(12).repeat(2)[None]).logits
        assert_close(packed.view_as(logits), logits)
        generated = model.generate(x, max_new_tokens=6, do_sample=False)
        slow = model.generate(x, max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(generated, slow)
    for other in (
        model.generate(x, max_new_tokens=6, do_sample=False, capture_step=True),
        deltazoo.generate(model, x, max_new_tokens=6),
    ):
        assert torch.equal(other, generated)

    model.save_pretrained(tmp_path)
    assert "\nimport trapezoid  # the layers' rule" in (tmp_path / "README.md").read_text()
    again = DeltaRuleForCausalLM.from_pretrained(tmp_path)
    assert type(again.model.layers[0].attn) is type(model.model.layers[0].attn)
    assert torch.equal(again(x).logits, model(x).logits)
    half = DeltaRuleForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.model.layers[0].attn.log_time.dtype == torch.float32


FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM

folder, rule, way = sys.argv[1:]
options = {}
if way != "remote code":  # transformers uses that only where the model type is unknown
    import deltazoo
if way == "imported":
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except ValueError as error:
        print("refused:", error)
    sys.path.insert(0, rule)
    import trapezoid
elif way == "remote code":
    options["trust_remote_code"] = True
model = AutoModelForCausalLM.from_pretrained(folder, **options)
logits = model(torch.arange(12)[None]).logits
torch.save(logits, folder + "/logits.pt")
print(type(model.model.layers[0].attn).__module__.rpartition(".")[2], model.config.mixer_module)
if way == "remote code":
    model.save_pretrained(folder + "/again")
    print(*sorted(path.name for path in __import__("pathlib").Path(folder, "again").glob("*.py")))
"""


def test_a_fresh_process_needs_the_module_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = outside_model()
    model.save_pretrained(tmp_path / "model", remote_code=True)
    logits = model(torch.arange(12)[None]).logits

    def fresh(way: str) -> str:
        run = run_python if way == "remote code" else run_well_after_transformers
        return run(FRESH, str(tmp_path / "model"), str(RULES), way)

    for way in ("imported", "remote code"):
        printed = fresh(way)
        if way == "imported":
            assert "refused:" in printed and "'trapezoid'" in printed and "--load trapezoid.py" in printed
            assert "a model saved with remote_code=True brings it along" in printed
        assert "trapezoid trapezoid" in printed.splitlines()
        assert torch.equal(torch.load(tmp_path / "model" / "logits.pt"), logits)
    assert {path.name for path in (tmp_path / "model" / "again").glob("*.py")} == {
        "configuration_deltazoo.py",
        "modeling_deltazoo.py",
        "trapezoid.py",
    }


def test_a_rule_that_is_in_no_file_of_its_own_is_not_copied_beside_a_model(tmp_path: Path) -> None:
    register_rule(replace(get_rule("delta_net"), name="in_a_test", hub_model_type=None))
    model = DeltaRuleForCausalLM(DeltaRuleConfig(**SIZES, mixer="in_a_test"))
    with pytest.raises(ValueError, match="only a rule in a file of its own"):
        model.save_pretrained(tmp_path / "model", remote_code=True)
    assert not (tmp_path / "model").exists() and not model.config.auto_map
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="only a rule in a file of its own"):
        deltazoo.models.export_remote_code(tmp_path / "model")
    assert not list((tmp_path / "model").glob("*.py"))


class ByHand(DeltaRuleAttention):
    def step_gate(self, x: LayerInput) -> torch.Tensor:
        return super().step_gate(x) / 2


def test_saving_layers_that_the_configuration_does_not_describe_raises(tmp_path: Path) -> None:
    model = DeltaRuleForCausalLM(DeltaRuleConfig(**SIZES, mixer="delta_net"))
    model.model.layers[1].attn = ByHand(**model.config.layer_options, layer_idx=1)
    with pytest.raises(ValueError, match=r"model.layers.1.attn is a .*ByHand, and the configuration would"):
        model.save_pretrained(tmp_path / "by_hand")
    assert not (tmp_path / "by_hand").exists()

    model = DeltaRuleForCausalLM(DeltaRuleConfig(**SIZES, mixer="delta_net"))
    model.model.layers[0].attn.allow_neg_eigval = True
    with pytest.raises(ValueError, match=r"model.layers.0.attn has allow_neg_eigval=True"):
        model.save_pretrained(tmp_path / "option")

    model = DeltaRuleForCausalLM(DeltaRuleConfig(**{**SIZES, **HYBRID}))
    model.model.layers[0].attn = model.model.layers[1].attn
    with pytest.raises(ValueError, match="is a deltazoo.models.softmax_attention.SoftmaxAttention"):
        model.save_pretrained(tmp_path / "softmax")


def test_fsdp_plan_names_what_the_layer_declares() -> None:
    config = DeltaRuleConfig(**SIZES, mixer="trapezoid")
    config.dtype = torch.bfloat16
    model = DeltaRuleForCausalLM(config).bfloat16()
    assert "model.layers.*.attn.time_proj" in model._fsdp_plan


def test_tensor_parallelism_refuses_what_a_layer_does_not_declare() -> None:
    layer = outside_layer()
    check_shares(layer, 2)
    layer.extra = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="TrapezoidAttention does not say in tensor_parallel how 'extra' is divided"):
        check_shares(layer, 2)
