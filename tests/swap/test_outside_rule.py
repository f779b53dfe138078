"""Softmax attention swapped for a rule in a file outside the package, whose layer owns a parameter."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import run_well_after_transformers
from outside_rule import RULES, trapezoid  # noqa: F401  (a fixture)
from tiny_families import tiny_original, tokens
from tiny_runs import write_text_folder
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import deltazoo
from deltazoo.layers import DeltaRuleAttention, LayerInput, layer_class, parameters_without_decay
from deltazoo.spec import RuleSpec, get_rule, register_rule
from deltazoo.swap import swapped_layers
from deltazoo.training.config import Recipe, TokenizerConfig, from_mapping
from deltazoo.training.distill import distill
from deltazoo.training.tokens import build_tokenizer

pytestmark = pytest.mark.usefixtures("trapezoid")

LOAD = """
import sys, torch, deltazoo
from transformers import AutoModelForCausalLM

folder, rules = sys.argv[1:]
if rules:
    sys.path.insert(0, rules)
    import trapezoid
try:
    model = AutoModelForCausalLM.from_pretrained(folder)
except ValueError as error:
    print("refused:", error)
    sys.exit()
ids, logits = torch.load(folder + "/logits.pt")
assert torch.equal(model(ids).logits, logits)
(pickled,) = torch.load(folder + "/pickled.pt", weights_only=False)
assert torch.equal(pickled(ids).logits, logits)
print(type(deltazoo.swap.swapped_layers(model)[0].delta).__mro__[2].__module__)
"""


def swapped(**options: Any) -> Any:
    model = tiny_original("llama")
    deltazoo.swap_attention(model, "trapezoid", **options)
    return model


def test_a_swapped_llama_generates_saves_and_loads_where_the_rule_is_known(tmp_path: Path) -> None:
    model, ids = swapped(), tokens(2, 9)
    for layer in swapped_layers(model).values():
        assert isinstance(layer.delta, layer_class("trapezoid"))
        torch.nn.init.uniform_(layer.delta.log_time, 0, 2)
    assert "log_time" in " ".join(parameters_without_decay(model))
    logits = model(ids).logits
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    assert_close(model(ids, attention_mask=mask).logits[0, 4:], model(ids[:1, 4:]).logits[0])
    cached, slow = (model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached, slow)
    assert torch.equal(copy.deepcopy(model)(ids).logits, logits)

    model.save_pretrained(tmp_path)
    torch.save((ids, logits), tmp_path / "logits.pt")
    torch.save((model,), tmp_path / "pickled.pt")
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert swapped_layers(half)[0].delta.log_time.dtype == torch.float32
    assert run_well_after_transformers(LOAD, str(tmp_path), str(RULES)).strip() == "trapezoid"
    refusal = run_well_after_transformers(LOAD, str(tmp_path), "")
    assert "refused:" in refusal and "--load trapezoid.py" in refusal
    assert "remote_code" not in refusal, "a swapped model cannot be saved with it"


def test_unswapping_leaves_nothing_of_the_rule() -> None:
    model = swapped(keep_teacher=True)
    before = tiny_original("llama")
    deltazoo.unswap_attention(model)
    assert model.config.to_dict() == before.config.to_dict()


def test_the_start_solves_for_any_step_size_and_decay_gate() -> None:
    """`beta |k|^2 = 1/2`, and time constants from 8 to 4,096 tokens, whatever the functions of the spec."""

    def linear_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        return -A_log.exp() * torch.relu(a + dt_bias + 1)

    spec = get_rule("trapezoid")
    changed = RuleSpec(**{**vars(spec), "name": "linear_decay", "decay_gate": linear_decay, "normalize_k": True})
    register_rule(changed)
    model = tiny_original("llama")
    deltazoo.swap_attention(model, "linear_decay")
    delta = swapped_layers(model)[0].delta
    assert_close(delta.dt_bias + 1, torch.logspace(-torch.tensor(8.0).log10(), -torch.tensor(4096.0).log10(), 4))

    model = swapped()
    delta, norm = swapped_layers(model)[0].delta, model.model.layers[0].input_layernorm
    with torch.no_grad():
        keys = delta.k_proj(norm(torch.randn(4000, 32))).unflatten(-1, (-1, 8))
        squared_length = keys.square().mean() * 8
        b = delta.step_gate(LayerInput(torch.zeros(1, 1, 32), delta)).mean()
    # The step size of the rule: b / (1 + b |k|^2 / 2).
    assert_close(b * squared_length / (1 + b * squared_length / 2), torch.tensor(0.5), rtol=0.05, atol=0)


class ByHand(DeltaRuleAttention):
    pass


def test_saving_a_swapped_layer_changed_by_hand_raises(tmp_path: Path) -> None:
    model = swapped()
    layer = swapped_layers(model)[1]
    layer.delta.neg_eigval = "erase"
    with pytest.raises(ValueError, match=r"layers.1.self_attn.delta has neg_eigval='erase'"):
        model.save_pretrained(tmp_path)
    layer.delta = ByHand("delta_net", 32, 4, 8)
    with pytest.raises(ValueError, match=r"layers.1.self_attn.delta is a .*ByHand"):
        model.save_pretrained(tmp_path)


def test_a_distillation_trains_the_rule_in(tmp_path: Path) -> None:
    stage = {"row_length": 32, "rows_per_batch": 2, "log_every": 1, "evaluate_every": 4, "evaluation_rows": 2}
    stage |= {"precision": "fp32", "steps": 4, "learning_rate": 1e-2, "save_every": 4}
    values = {
        "output": str(tmp_path / "run"),
        "data": {"text": str(write_text_folder(tmp_path / "text", 1000)), "validation_fraction": 0.2},
        "align": stage,
        "finetune": stage,
    }
    tokenizer = build_tokenizer(TokenizerConfig("byte"), [])
    model = tiny_original("llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    original = copy.deepcopy(model)
    deltazoo.swap_attention(model, "trapezoid")
    result = distill(model, original, tokenizer, from_mapping(Recipe, values))
    assert set(result.scores) == {"original", "transfer", "align", "finetune"}
    trained = AutoModelForCausalLM.from_pretrained(result.model_path)
    assert trained.config.mixer_module == "trapezoid"
    assert not (swapped_layers(trained)[0].delta.log_time == 1).any()  # it has learned
