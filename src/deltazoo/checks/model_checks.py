"""Checks of whole models of a few thousand parameters: with a cache, through a checkpoint, swapped into a Llama."""

import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from deltazoo.checks.layer_checks import difference, perturbed
from deltazoo.generation.cache import CACHE
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM
from deltazoo.swap import swap_attention
from deltazoo.training.console import no_transformers_bars

_SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
_PURE: dict[str, Any] = {"num_hidden_layers": 2, "num_heads": 2, "head_dim": 16}
_HYBRID = {**_PURE, "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4}


def _model(rule: str, **keys: Any) -> DeltaRuleForCausalLM:
    model: Any = DeltaRuleForCausalLM(DeltaRuleConfig(mixer=rule, **_SIZES, **keys))
    return perturbed(model, 0.05).double().eval()


def _ids() -> Tensor:
    return torch.randint(1, 61, (2, 12))


@torch.no_grad()
def same_generated(rule: str) -> str | None:
    """A difference between logits of single tokens with a cache and of all at once, in a pure and a hybrid model."""
    for kind, keys in (("", _PURE), ("hybrid ", _HYBRID)):
        model, ids = _model(rule, **keys), _ids()
        if found := difference(_with_cache(model, ids), model(ids).logits):
            return f"a {kind}model's logits with a cache differ from those without, {found}"
        made = [model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=cache) for cache in (True, False)]
        if not torch.equal(*made):
            return f"a {kind}model generates other tokens with a cache than without"
    return None


def _with_cache(model: Any, ids: Tensor) -> Tensor:
    first = model(ids[:, :5], use_cache=True)
    logits, cache = [first.logits], getattr(first, CACHE)
    logits += [model(token, **{CACHE: cache}).logits for token in ids[:, 5:].split(1, dim=1)]
    return torch.cat(logits, dim=1)


def same_after_reload(rule: str) -> str | None:
    """A difference between logits before saving and after loading, in a pure and a hybrid model; None without one."""
    return _through_a_checkpoint(_model(rule, **_PURE)) or _through_a_checkpoint(_model(rule, **_HYBRID))


def _through_a_checkpoint(model: Any) -> str | None:
    ids = _ids()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), no_transformers_bars():
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
        found = difference(again.double()(ids).logits, model(ids).logits)
    return found and (
        f"a model that was saved and loaded gives other logits, {found}: something that decides the layer's results is "
        "neither a parameter nor in the configuration"
    )


@torch.no_grad()
def swaps(rule: str) -> str | None:
    """A fault of a Llama with swapped attention: logits not finite, or other ones with a cache or after loading."""
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **_SIZES)
    model: Any = LlamaForCausalLM(config)
    swap_attention(model, rule, [0])
    model, ids = perturbed(model, 0.05).double().eval(), _ids()
    logits = model(ids).logits
    if not logits.isfinite().all():
        return "the swapped model's logits are not finite"
    if found := difference(_with_cache(model, ids), logits):
        return f"the swapped model's logits with a cache differ from those without, {found}"
    return _through_a_checkpoint(model)
