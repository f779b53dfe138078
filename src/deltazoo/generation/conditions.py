"""Reasons, in words: why a model is not decoded by our own loops or by a captured step in `generate`, and where NaN of
its logits comes from.

A graph repeats the work that the device was given during the capture. Everything else that Python does happens once, at
the capture: hooks, counts on the host, choices made from attributes. If that would matter, the ordinary loop runs.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticCache,
)
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import is_fsdp_managed_module

from deltazoo._report import RunsDeltaRule
from deltazoo.generation.cache import DeltaRuleCacheLayer, is_used
from deltazoo.generation.capture import graphs_run_on
from deltazoo.generation.static_cache import IMPLEMENTATIONS, describe_layer, fixed_cache, why_not_fixed
from deltazoo.layers import DeltaRuleAttention
from deltazoo.names import first_reason

_LEARNED_POSITIONS = ("wpe", "embed_positions", "position_embeddings")
"""Names under which models of transformers hold a table of learned positions."""
_ONE_TOKEN_AT_A_TIME = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)

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
"""Options of a generation config that change the likeliest tokens of `model.generate`, or where they end, and the value
that changes nothing, as None does. `Sampling` has the options by which tokens are drawn."""


def check_model(model: Any) -> None:
    """Raise ValueError unless decoding loops can run a model.

    It needs our delta-rule layers and evaluation mode, and no rules for its logits that only `model.generate` computes.
    """
    layers = model.modules() if isinstance(model, nn.Module) and isinstance(model, GenerationMixin) else ()
    # Our own models generate by `CapturedGeneration`, also those without delta-rule layers.
    if not any(isinstance(x, DeltaRuleAttention | RunsDeltaRule) or hasattr(x, "describe_decoding") for x in layers):
        instead = "pass its get_base_model()" if hasattr(model, "get_base_model") else "use its generate"
        raise ValueError(
            "deltazoo.generate and the server take causal language models with our delta-rule layers "
            "(deltazoo.swap_attention puts them in, deltazoo.accelerate makes them of transformers' own), got "
            f"{type(model).__name__}: {instead}"
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


def why_not_this_model(model: Any) -> str | None:
    """The reason why the steps of a model in its present state should run one by one; None if they may be captured."""
    device = model.device
    if not graphs_run_on(device):
        return f"the model is on {device}, where there are no CUDA graphs"
    divided = (getattr(model, "_tp_size", None) or 1) > 1 or is_fsdp_managed_module(model)
    reason = first_reason(
        (model.training, "the model is in training mode"),
        (torch.is_autocast_enabled(device.type), "autocast is on, and keeps copies of weights"),
        (torch.compiler.is_compiling(), "it is being compiled"),
        (getattr(model, "hf_quantizer", None) is not None, "the model is quantised"),
        (divided, "the model is divided among processes"),
    )
    return reason or _unusual_tensor(model, device) or _unusual_module(model) or _unusual_cache(model)


def _unusual_tensor(model: nn.Module, device: torch.device) -> str | None:
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.device != device:
            return f"{name} is on {x.device} and the model on {device}"
        if type(x) not in (nn.Parameter, Tensor) or hasattr(x, "ds_id"):
            return f"{name} is no plain tensor but a {type(x).__name__}"
    return None


def _unusual_module(model: nn.Module) -> str | None:
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "there are forward hooks for all modules"
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(not _is_of("deltazoo.", hook) for hook in hooks):
            return f"{name or 'the model'} has a forward hook"
        replaced = vars(module).get("forward")
        of_a_step = _is_of("deltazoo.generation.", replaced)  # for a time, in another thread
        if (replaced is not None and not of_a_step) or module._compiled_call_impl is not None:
            return f"the forward pass of {name or 'the model'} has been replaced"
    if "prepare_inputs_for_generation" in vars(model):
        return "prepare_inputs_for_generation has been replaced"
    config: Any = model.config
    softmax = [m for m in model.modules() if getattr(m, "is_causal", False)]
    if softmax and config._attn_implementation not in IMPLEMENTATIONS:
        return f"softmax attention runs {config._attn_implementation!r}, not one of {', '.join(IMPLEMENTATIONS)}"
    return None


def _unusual_cache(model: nn.Module) -> str | None:
    try:
        fixed_cache(model, max_length=1)
    except ValueError as error:
        return str(error)
    return None


def _is_of(package: str, hook: Any) -> bool:
    """Whether a hook or forward pass belongs to this package, whose hooks act for one token on the device alone."""
    function = getattr(hook, "func", hook)  # the function of a partial
    return getattr(function, "__module__", "").startswith(package)


def why_not_this_call(
    config: GenerationConfig, cache: Cache | None, is_the_callers: bool, mode: GenerationMode, required: bool
) -> str | None:
    """The reason why a call of `generate` with prepared arguments should run its steps one by one; None if it need not.

    Args:
        is_the_callers: whether the caller of `generate` passed the cache.
        required: whether the user asked for captured steps; a cache of the user's is then allowed.
    """
    implementation, unasked = config.cache_implementation, not required
    reason = first_reason(
        (mode not in _ONE_TOKEN_AT_A_TIME, f"{mode.value} is no plain sampling or beam search"),
        (cache is None, "use_cache=False keeps no state"),
        (config.output_hidden_states, "output_hidden_states=True asks a step for more than its logits"),
        (config.output_attentions, "output_attentions=True asks a step for more than its logits"),
        (config.compile_config is not None, "compile_config asks for transformers' own compilation"),
        (unasked and implementation is not None, f"cache_implementation={implementation!r} was asked for"),
        (unasked and is_the_callers, "a cache was given"),
        (unasked and config.return_dict_in_generate, "return_dict_in_generate=True hands out the cache"),
    )
    return reason or _why_not_this_cache(cache)


def _why_not_this_cache(cache: Any) -> str | None:
    if type(cache) is StaticCache:
        return why_not_fixed(cache)
    if type(cache) is not DynamicCache:
        return f"the cache is a {type(cache).__name__}"
    if cache.offloading:
        return "the cache is offloaded"
    layers: list[Any] = cache.layers
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DeltaRuleCacheLayer, LinearAttentionLayer):
            return f"the cache has a {describe_layer(layer)}"
        if is_used(layer):
            return "the cache has been used"
    return None


def max_positions(model: Any) -> int | None:
    """The `max_position_embeddings` of a model's configuration, None without one.

    Rotary embeddings can be computed beyond it; learned positions end there.
    """
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def learned_positions(model: Any) -> int | None:
    """The number of learned positions, such as GPT-2's; None for models without, which take longer rows."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _LEARNED_POSITIONS:
            return min(module.num_embeddings, max_positions(model) or module.num_embeddings)
    return None


def check_positions(model: Any, num_tokens: int, what: str) -> None:
    """Raise ValueError if a row of `num_tokens` exceeds a model's learned positions; the message begins with `what`."""
    limit = learned_positions(model)
    if limit is not None and num_tokens > limit:
        raise ValueError(f"{what} exceed the {limit} learned positions of {type(model).__name__}")


@contextmanager
def watch_for_nan(model: nn.Module) -> Iterator[list[str]]:
    """A context whose list gets a clause about the first module whose output holds NaN or infinity.

    It waits for the device after each module. -inf alone is no fault, since it hides tokens.
    """
    found: list[str] = []

    def look(name: str, module: nn.Module, _: Any, output: Any) -> None:
        if not found and (kind := _kind_in(tree_leaves(output))) is not None:
            weights = [(own, _kind_in([x])) for own, x in module.named_parameters(recurse=False)]
            cause = next((f", whose {own} holds {kind}" for own, kind in weights if kind is not None), "")
            found.append(f"{kind} comes first in the output of {name or type(module).__name__}{cause}")

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(look, name)).remove)
        yield found


@torch.no_grad()
def origin_of_nan(model: Any, input_ids: Tensor) -> str:
    """A clause for the message that a model computed NaN: "; NaN comes first in the output of ...", or nothing.

    It runs one forward pass over the tokens; if that computes no NaN, or fails, there is no clause.

    Args:
        input_ids: `[1, T]`.
    """
    with watch_for_nan(model) as found, suppress(Exception), torch.compiler.set_stance("force_eager"):
        options = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        model(input_ids=input_ids, use_cache=False, **options)
    return f"; {found[0]}" if found else ""


def _kind_in(values: Iterable[Any]) -> str | None:
    for x in values:
        if isinstance(x, Tensor) and x.is_floating_point() and not bool((x < torch.inf).all()):
            return "NaN" if bool(x.isnan().any()) else "infinity"
    return None
