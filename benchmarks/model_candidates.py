"""Models that are timed: ours, and peers of the same size in the same process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from deltazoo.compat import accelerate
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM
from deltazoo.names import unknown
from deltazoo.spec import list_rules
from deltazoo.swap import swap_attention

__all__ = ["PEERS", "SIZES", "Candidate", "Size", "candidates"]

PEERS = ("llama", "fla", "swapped", "qwen3-next")
"""llama: transformers' Llama with torch's SDPA. fla: flash-linear-attention's model of the same mixer, on a GPU.
swapped: the Llama with Gated DeltaNet in three of four layers. qwen3-next: transformers' own, and it accelerated."""

_FLA_MODELS = {"delta_net": "DeltaNet", "gated_deltanet": "GatedDeltaNet", "kda": "KDA"}


@dataclass(frozen=True)
class Size:
    """Widths that all candidates share."""

    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False


SIZES = {
    # As configs/quickstart_cpu.yaml and configs/*_340m.yaml.
    "quickstart": Size(192, 2, 4, 32, 512, 2048, tie_word_embeddings=True),
    "340m": Size(1024, 24, 8, 128, 2816, 32000),
    "1.3b": Size(2048, 24, 16, 128, 5632, 32000),
}


@dataclass(frozen=True)
class Candidate:
    """One model of one library.

    `build` makes it with random weights on the current default device; ours takes runtime options.
    """

    model: str
    library: str
    build: Callable[..., Any]


def candidates(size: Size, mixers: list[str], peers: list[str], device: str) -> tuple[list[Candidate], dict[str, str]]:
    """The models to time, and the reason why each missing peer is missing.

    Raises:
        ValueError: an unknown mixer or peer.
    """
    for mixer in mixers:
        if mixer not in list_rules():
            raise ValueError(unknown("mixer", mixer, list_rules()))
    for peer in peers:
        if peer not in PEERS:
            raise ValueError(unknown("peer", peer, PEERS))
    taking_part = [Candidate(mixer, "deltazoo", partial(_ours, size, mixer)) for mixer in mixers]
    missing: dict[str, str] = {}
    if "llama" in peers:
        taking_part.append(Candidate("llama", "transformers", partial(_llama, size)))
    if "swapped" in peers:
        taking_part.append(Candidate("llama-swapped", "deltazoo", partial(_swapped, size)))
    if "qwen3-next" in peers:
        taking_part.append(Candidate("qwen3-next", "transformers", partial(_qwen3_next, size)))
        taking_part.append(Candidate("qwen3-next", "accelerated", partial(_accelerated, size)))
    if "fla" in peers:
        if torch.device(device).type != "cuda":
            missing["fla"] = "its kernels need a GPU"
        else:
            try:
                models = importlib.import_module("fla.models")
            except ImportError as error:
                missing["fla"] = f"not importable: {error}"
            else:
                named = [mixer for mixer in mixers if mixer in _FLA_MODELS]
                taking_part += [Candidate(mixer, "fla", partial(_fla, models, size, mixer)) for mixer in named]
    return taking_part, missing


def _ours(size: Size, mixer: str, **runtime: Any) -> Any:
    # One channel per value for all mixers, so that they differ in the rule and not in their widths.
    return DeltaRuleForCausalLM(DeltaRuleConfig(mixer=mixer, expand_v=1, **vars(size)), **runtime)


def _llama(size: Size) -> Any:
    widths = {name: value for name, value in vars(size).items() if name != "num_heads"}
    config = LlamaConfig(
        num_attention_heads=size.num_heads,
        max_position_embeddings=2**20,
        bos_token_id=None,
        eos_token_id=None,
        **widths,
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def _swapped(size: Size, **runtime: Any) -> Any:
    model = _llama(size)
    swap_attention(model, "gated_deltanet", layers="3:1", init="random")
    model.set_runtime(**runtime)
    return model


def _qwen3_next(size: Size) -> Any:
    """Without experts; three of four layers are linear."""
    last = size.num_hidden_layers - 1
    softmax = [index % 4 == 3 or index == last for index in range(size.num_hidden_layers)]
    config = Qwen3NextConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_hidden_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        head_dim=size.head_dim,
        linear_num_key_heads=size.num_heads,
        linear_num_value_heads=size.num_heads,
        linear_key_head_dim=size.head_dim,
        linear_value_head_dim=size.head_dim,
        layer_types=["full_attention" if is_softmax else "linear_attention" for is_softmax in softmax],
        mlp_only_layers=list(range(size.num_hidden_layers)),
        tie_word_embeddings=size.tie_word_embeddings,
    )
    config._attn_implementation = "sdpa"
    return Qwen3NextForCausalLM(config)


def _accelerated(size: Size) -> Any:
    model = _qwen3_next(size)
    accelerate(model)
    return model


def _fla(models: Any, size: Size, mixer: str) -> Any:
    widths = dict(vars(size))
    if mixer == "delta_net":
        del widths["head_dim"]  # its DeltaNet divides the hidden size by the heads
    config = getattr(models, f"{_FLA_MODELS[mixer]}Config")(**widths, expand_v=1)
    return getattr(models, f"{_FLA_MODELS[mixer]}ForCausalLM")(config)
