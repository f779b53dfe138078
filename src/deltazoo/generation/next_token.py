"""One token further: the parts that all decoding loops over a static cache share.

`check_model` says which models they take, `next_logits` is the forward pass of a step, `prepared_inputs` its arguments,
and `read_later` hands the host what a step has made while the device is at the next.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from deltazoo._report import RunsDeltaRule
from deltazoo.generation.cache_argument import CACHE
from deltazoo.generation.hf_generate import CapturedGeneration
from deltazoo.layers import DeltaRuleAttention

__all__ = ["check_model", "next_logits", "prepared_inputs", "read_later", "wait_for"]

_RULES: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": [],
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "remove_invalid_values": False,
    "repetition_penalty": 1,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": [],
    "watermarking_config": None,
}
"""What in a generation config changes the likeliest tokens of `model.generate`, or where they end, and the value that
changes nothing, as None does. How tokens are drawn is not in it: `Sampling` says that."""


def check_model(model: Any) -> None:
    """ValueError unless decoding loops can run a model: with our delta-rule layers, in evaluation mode, and without
    rules for its logits that only `model.generate` computes.
    """
    layers = model.modules() if isinstance(model, nn.Module) and isinstance(model, GenerationMixin) else ()
    if not any(isinstance(layer, CapturedGeneration | DeltaRuleAttention | RunsDeltaRule) for layer in layers):
        raise ValueError(
            "the loop is for causal language models with our delta-rule layers (deltazoo.swap_attention puts them in, "
            f"deltazoo.accelerate makes them of transformers' own), got {type(model).__name__}: use its generate"
        )
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    rules = {name: getattr(model.generation_config, name, None) for name in _RULES}
    rules = {name: value for name, value in rules.items() if value is not None and value != _RULES[name]}
    if rules:
        raise ValueError(
            f"the loop does not compute what model.generation_config asks for by "
            f"{', '.join(f'{name}={value!r}' for name, value in rules.items())}: use model.generate, or set "
            f"{'it' if len(rules) == 1 else 'them'} to None"
        )


def prepared_inputs(
    model: Any, tokens: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor | None, **options: Any
) -> dict[str, Any]:
    """Arguments of a forward pass that gives the last token's logits, as `model.generate` prepares them.

    Args:
        model: whose forward pass it is.
        tokens: `[B, T]`.
        cache: that they continue.
        mask: the argument `attention_mask`.
        positions: `[B, T]`, the argument `position_ids`.
        options: further ones of `prepare_inputs_for_generation`.
    """
    if model._supports_logits_to_keep():
        options["logits_to_keep"] = 1
    return model.prepare_inputs_for_generation(
        tokens, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: cache}, **options
    )


def next_logits(
    model: Any,
    tokens: Tensor,
    cache: Cache,
    visible: Tensor | None,
    positions: Tensor | None,
    forward: Callable[..., Any] | None = None,
) -> Tensor:
    """Logits `[N, vocabulary]` after one further token of each row.

    Args:
        model: whose step it is.
        tokens: `[N, 1]` int64. `NO_TOKEN` counts as token 0: a step behind it has begun before the host reads it.
        cache: of these rows.
        visible: `[N, columns]`, 1 for columns of softmax layers that the token of a row may attend to; None: as many as
            the cache has counted.
        positions: `[N, 1]` int64, of the tokens in their rows; None: as the model counts them.
        forward: the model, or a compiled form of it; default: the model.
    """
    inputs = prepared_inputs(model, tokens.clamp(min=0), cache, visible, positions)
    mask = inputs.get("attention_mask")
    if isinstance(mask, dict) and "linear_attention" in mask:  # of older versions; this token is real
        inputs["attention_mask"] = mask | {"linear_attention": None}
    return (model if forward is None else forward)(**inputs).logits[:, -1]


def read_later(x: Tensor) -> Callable[[], Tensor]:
    """Start copying a tensor to the host; the result, when called, waits for that copy alone and returns it.

    Args:
        x: may be overwritten by operations that follow.
    """
    if x.device.type != "cuda":
        copied = x.detach().clone()
        return lambda: copied
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    wait = wait_for(x.device)

    def read() -> Tensor:
        wait()
        return host

    return read


def wait_for(device: torch.device) -> Callable[[], None]:
    """A function that waits for what the device has been given until now."""
    if device.type != "cuda":
        return lambda: None
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    return done.synchronize
