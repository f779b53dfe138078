"""Every kind of model that can be served is loaded in the form that the engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import byte_tokenizer
from foreign_models import foreign_model
from tiny_families import tiny_original
from tiny_serving import tiny

import deltazoo
from deltazoo.compat.transformers.layer import AcceleratedLayer
from deltazoo.serving import Engine, Request
from deltazoo.serving.model_loading import load_for_serving


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def swapped() -> Any:
    model = tiny_original("llama", vocab_size=258)
    deltazoo.swap_attention(model, "gated_deltanet")
    return model


@pytest.mark.parametrize("make", [tiny, swapped])
def test_a_saved_model_is_served(make: Any, tmp_path: Path) -> None:
    model, tokenizer = load_for_serving(saved(make(), tmp_path), "cpu")
    prompt = tuple(tokenizer("def f(x):")["input_ids"])
    ids = torch.tensor([prompt])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, len(prompt) :].tolist()
    with Engine(model, tokenizer, widths=(2,), context_limit=60) as engine:
        stream = engine.submit(Request(prompt=prompt, max_tokens=6, temperature=0, ignore_eos=True))
        assert [token for piece in stream for token in piece.token_ids] == expected


def test_the_dtype_can_be_chosen(tmp_path: Path) -> None:
    model, _ = load_for_serving(saved(tiny(), tmp_path), "cpu", torch.bfloat16)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16


def test_models_of_transformers_are_accelerated(tmp_path: Path) -> None:
    model, _ = load_for_serving(saved(foreign_model("qwen3_next", vocab_size=258), tmp_path), "cpu")
    assert any(isinstance(module, AcceleratedLayer) for module in model.modules())


def test_a_model_without_delta_rule_layers_is_refused(tmp_path: Path) -> None:
    path = saved(tiny_original("llama", vocab_size=258), tmp_path)
    with pytest.raises(ValueError, match="no delta-rule layer"):
        load_for_serving(path, "cpu")
