"""What transformers' own tests of models and tools around it expect of every model class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_hosts import tiny_host
from tiny_models import tiny_model, tokens
from transformers import AutoModelForCausalLM, GenerationMixin

import deltazoo.models
from deltazoo import swap_attention


def swapped(family: str = "llama", variant: str = "gated_deltanet") -> Any:
    model = tiny_host(family)
    swap_attention(model, variant, [0, 2])
    return model


def model_of(case: str) -> Any:
    return swapped(variant=case.removeprefix("swapped_")) if case.startswith("swapped_") else tiny_model(case)


def test_generation_is_a_direct_base_of_what_generates() -> None:
    classes = [value for name, value in vars(deltazoo.models).items() if name.endswith("ForCausalLM")]
    assert len(classes) == 5
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


@pytest.mark.parametrize("case", ["gated_deltanet", "kda", "hybrid", "swapped_kda"])
def test_prefix_tuning_is_refused_in_a_sentence(case: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(model_of(case), config)
    with pytest.raises(ValueError, match=r"layer 0 of the model is linear, .* \(prefix tuning\)"):
        model(tokens(2, 6))
