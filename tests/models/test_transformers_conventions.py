"""What transformers' own tests of models and tools around it expect of every model class."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kinds import KINDS, model_of_kind
from tiny_families import swapped
from tiny_models import CONFIGS, HYBRID, tiny_config, tiny_model, tokens
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin

import deltazoo.models
from deltazoo.models import DeltaRuleForCausalLM


def model_of(case: str) -> Any:
    return swapped(rule=case.removeprefix("swapped_")) if case.startswith("swapped_") else tiny_model(case)


def test_generation_is_a_direct_base_of_what_generates() -> None:
    classes = [value for name, value in vars(deltazoo.models).items() if name.endswith("ForCausalLM")]
    assert len(classes) == len(CONFIGS)
    for model_class in [*classes, type(swapped())]:
        assert GenerationMixin in model_class.__bases__ and model_class.can_generate(), model_class
    assert GenerationMixin not in type(swapped().model).__bases__


@pytest.mark.parametrize(
    "case", ["gated_deltanet", "delta_net", "kda", "hybrid", "swapped_gated_deltanet", "swapped_efla"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_listed_as_float32_is_there_and_is_float32(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model_of(case).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    listed = model._keep_in_fp32_modules | model._keep_in_fp32_modules_strict
    assert listed == ({"A_log", "dt_bias"} if case not in ("delta_net", "swapped_efla") else set())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name.rpartition(".")[2] in listed else dtype), name


@pytest.mark.parametrize("case", ["gated_deltanet", "hybrid", "swapped_kda"])
def test_token_types_of_tokenizers_have_no_effect(case: str) -> None:
    model, ids = model_of(case), tokens(2, 6)
    inputs = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, model(ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_tuning_is_refused_in_a_sentence(kind: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model, ids = peft.get_peft_model(model_of_kind(kind), config), tokens(2, 6)
    theirs = "seem to only contain Attention layers"  # transformers 5.14 looks before its layers are called
    with pytest.raises(ValueError, match=rf"layer 0 of the model is linear, .* \(prefix tuning\)|{theirs}"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))


def test_a_cache_without_layers_says_how_to_make_one() -> None:
    model, ids = model_of_kind("accelerated"), tokens(2, 6)
    with pytest.raises(ValueError, match=r"the cache has 0 layers .*DynamicCache\(config=model.config\)"):
        model(ids, past_key_values=DynamicCache())


@pytest.mark.parametrize("case", ["hybrid", "softmax_only", "gated_deltanet"])
@pytest.mark.parametrize("num_layers", [2, 1])
def test_implementations_of_attention_agree_after_saving(case: str, num_layers: int, tmp_path: Path) -> None:
    """transformers' tests set the epsilon of norms under every name, and cut models down to one layer."""
    keys = {**HYBRID, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    layer_types = tiny_config(case).layer_types[:num_layers]
    with warnings.catch_warnings(action="ignore"):  # of softmax keys in a model without such layers
        config = tiny_config(case, **{**keys, "num_hidden_layers": num_layers, "layer_types": layer_types})
    for name in ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon", "batch_norm_eps"):
        setattr(config, name, 1.0)
    with pytest.warns(UserWarning, match="'rms_norm_eps'"):
        DeltaRuleForCausalLM(config).save_pretrained(tmp_path)
    ids, mask = tokens(3, 7), torch.ones(3, 7, dtype=torch.long)
    mask[-1, :2] = 0
    with torch.no_grad(), pytest.warns(UserWarning, match="'rms_norm_eps'"):
        eager, sdpa = (
            AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)(ids, attention_mask=mask).logits
            for name in ("eager", "sdpa")
        )
    torch.testing.assert_close(eager[mask.bool()], sdpa[mask.bool()], rtol=1e-4, atol=1e-5)
