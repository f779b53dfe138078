"""Training of whole models beside peers of the same size in the same process.

    python -m benchmarks.models --out benchmarks/results/models_h200.json
    python -m benchmarks.models --out run.json --models none --peers qwen3.5 olmo-hybrid --dtypes autocast \
        --shapes 8x2048 --ways eager packed
    python -m benchmarks.models --out run.json --device cpu --threads 2

A step is forward, backward, clipping and AdamW on random tokens. What was measured:

    first_step_s                   first training step of a fresh model, compilation included
    train_tok_s, train_peak_gib    tokens per second; peak memory of such a step, model and optimizer included

Ways to train: `eager` has default options, with which our steps may be captured; `compile` is through torch.compile;
`packed` has documents of 64 to 2,048 tokens side by side, which transformers' own code does not keep apart; the others
are runtime options of our models. Decoding: `decoding.py`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.common import Results, Row, Spread, clock_for, document_positions, options
from deltazoo.compat import accelerate
from deltazoo.layers import RMSNorm, SwiGLU
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM
from deltazoo.runtime import RUNTIME_OPTIONS
from deltazoo.swap import swap_attention


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
    # As configs/quickstart_cpu.yaml and the presets at paper sizes.
    "quickstart": Size(192, 2, 4, 32, 512, 2048, tie_word_embeddings=True),
    "340m": Size(1024, 24, 8, 128, 2816, 32000),
    "1.3b": Size(2048, 24, 16, 128, 5632, 32000),
}
FLA_MODELS = {"delta_net": "DeltaNet", "gated_deltanet": "GatedDeltaNet", "kda": "KDA"}
NATIVE = {"qwen3-next": "qwen3_next", "qwen3.5": "qwen3_5_text", "olmo-hybrid": "olmo_hybrid"}
PEERS = ("llama", "fla", "swapped", *NATIVE)
"""llama: transformers' Llama with torch's SDPA. fla: flash-linear-attention's model of the same rule, on a GPU.
swapped: the Llama with Gated DeltaNet in three of four layers. Others: transformers' own, and they accelerated."""

AUTOCAST = "autocast"
"""The dtype of rows with float32 weights under bfloat16 autocast, as `deltazoo train` runs."""

OUR_WAYS: dict[str, dict[str, Any]] = {
    "no-options": {"fuse_linear_cross_entropy": False, "recompute": "none"},
    "recompute-elementwise": {"recompute": "elementwise"},
    "captured": {"captured_training": "auto"},
}
"""Ways that are runtime options of our models, beside `eager`. no-options: as the default was before the loss was
fused, elementwise results were recomputed, and SwiGLU and norms had kernels. captured: the default, where steps of one
shape run as CUDA graphs; `captured_training.py` times it without waiting after every step."""
EAGER = {"captured_training": False} if "captured_training" in RUNTIME_OPTIONS else {}
"""Options of every other way. Sources from before have none."""


@dataclass(frozen=True)
class Candidate:
    """One model of one library; `build` makes it with random weights on the default device, ours with options."""

    model: str
    library: str
    build: Callable[..., Any]


def candidates(size: Size, models: list[str], peers: list[str]) -> list[Candidate]:
    """The models to time, ours first."""
    found = [Candidate(rule, "deltazoo", partial(_ours, size, rule)) for rule in models]
    if "llama" in peers:
        found.append(Candidate("llama", "transformers", partial(_llama, size)))
    if "swapped" in peers:
        found.append(Candidate("llama-swapped", "deltazoo", partial(_swapped, size)))
    for peer in (name for name in NATIVE if name in peers):
        found.append(Candidate(peer, "transformers", partial(_native, size, peer)))
        found.append(Candidate(peer, "accelerated", partial(_accelerated, size, peer)))
    if "fla" in peers:
        found += [Candidate(rule, "fla", partial(_fla, size, rule)) for rule in models if rule in FLA_MODELS]
    return found


def _ours(size: Size, rule: str, **runtime: Any) -> Any:
    # One channel per value for all rules, so that they differ in the rule and not in their widths.
    return DeltaRuleForCausalLM(DeltaRuleConfig(mixer=rule, expand_v=1, **vars(size)), **runtime)


def _llama(size: Size) -> Any:
    widths = {name: value for name, value in vars(size).items() if name != "num_heads"}
    none = {"bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(num_attention_heads=size.num_heads, max_position_embeddings=2**20, **none, **widths)
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def _swapped(size: Size, **runtime: Any) -> Any:
    model = _llama(size)
    swap_attention(model, "gated_deltanet", layers="3:1", init="random")
    model.set_runtime(**runtime)
    return model


def _native(size: Size, peer: str) -> Any:
    """Of transformers' own class, without experts; three of four layers are linear.

    Qwen3-Next has the widths of the other candidates. Qwen3.5 and OLMo Hybrid have 20 layers for 24, and heads as in
    their releases, which makes about as many parameters.
    """
    heads, dim = size.num_heads, size.head_dim
    layers = size.num_hidden_layers if peer == "qwen3-next" else max(size.num_hidden_layers * 5 // 6, 2)
    softmax = [index % 4 == 3 or index == layers - 1 for index in range(layers)]
    options = {name: value for name, value in vars(size).items() if name != "num_heads"} | {
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if is_softmax else "linear_attention" for is_softmax in softmax],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
    }
    if peer == "qwen3-next":
        options["mlp_only_layers"] = list(range(layers))
    elif peer == "qwen3.5":
        options |= {"linear_num_value_heads": 2 * heads, "num_key_value_heads": max(heads // 4, 1)}
    else:
        del options["head_dim"]
        options |= {"linear_key_head_dim": dim * 3 // 4, "linear_value_head_dim": dim * 3 // 2}
        options |= {"linear_allow_neg_eigval": True, "pad_token_id": None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(NATIVE[peer], **options), attn_implementation="sdpa")


def _accelerated(size: Size, peer: str, **runtime: Any) -> Any:
    model = _native(size, peer)
    accelerate(model, **runtime)
    return model


def _fla(size: Size, rule: str) -> Any:
    models, widths = importlib.import_module("fla.models"), dict(vars(size))
    if rule == "delta_net":
        del widths["head_dim"]  # its DeltaNet divides the hidden size by the heads
    config = getattr(models, f"{FLA_MODELS[rule]}Config")(**widths, expand_v=1)
    return getattr(models, f"{FLA_MODELS[rule]}ForCausalLM")(config)


class TrainingStep:
    """Forward, backward, clipping and a step of AdamW on random tokens."""

    def __init__(self, candidate: Candidate, setting: Row, device: str) -> None:
        self.device, self.clock, way, dtype = device, clock_for(device), setting["way"], setting["dtype"]
        torch.manual_seed(0)
        with torch.device(device):
            ours = candidate.library in ("deltazoo", "accelerated")
            model = candidate.build(**(EAGER | OUR_WAYS.get(way, {}) if ours else {}))
        self.model = model.to(torch.float32 if dtype == AUTOCAST else getattr(torch, dtype)).train()
        if way == "no-options":
            for module in self.model.modules():
                if isinstance(module, SwiGLU) or type(module) is RMSNorm:
                    module.fused = False
        self.autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == AUTOCAST)
        self.forward = torch.compile(self.model) if way == "compile" else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(0, self.model.config.vocab_size, (setting["batch"], setting["tokens"]), device=device)
        self.batch: Row = {"input_ids": ids, "labels": ids}
        if way == "packed":
            rows = ids.reshape(1, -1)
            self.batch = {"input_ids": rows, "labels": rows, "position_ids": document_positions(ids.numel(), device)}

    def seconds(self) -> float:
        """Run one step and wait for it."""
        began = self.clock()
        with self.autocast:
            loss = self.forward(**self.batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return self.clock() - began


def measure(candidate: Candidate, setting: Row, device: str, steps: int) -> Iterator[tuple[str, Spread | float]]:
    """The first step, and after others to warm up, one of which may be captured, speed and memory of further ones."""
    step = TrainingStep(candidate, setting, device)
    yield "first_step_s", step.seconds()
    for _ in range(3):
        step.seconds()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    seconds = Spread.of([step.seconds() for _ in range(steps)])
    yield "train_tok_s", seconds.rate_of(setting["batch"] * setting["tokens"])
    if device != "cpu":
        yield "train_peak_gib", torch.cuda.max_memory_allocated() / 2**30


def clear() -> None:
    """Free what the model before left."""
    gc.collect()
    if "torch._dynamo" in sys.modules:  # whose import takes seconds
        torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def model_options(description: str | None) -> argparse.ArgumentParser:
    """Options that training and decoding share."""
    parser = options(description)
    parser.add_argument("--size", choices=SIZES, help="340m on a GPU, quickstart on a CPU")
    parser.add_argument("--models", nargs="+", default=["gated_deltanet", "delta_net"], help="our rules, or none")
    parser.add_argument("--peers", nargs="*", default=["llama", "fla"], choices=PEERS)
    parser.add_argument("--dtypes", nargs="+", help="bfloat16 on a GPU, float32 on a CPU; autocast only to train")
    parser.add_argument("--threads", type=int, help="of a CPU")
    return parser


def model_settings(arguments: argparse.Namespace) -> Iterator[tuple[Candidate, Row]]:
    """The candidates and how their rows begin."""
    on_cpu = arguments.device == "cpu"
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size = arguments.size or ("quickstart" if on_cpu else "340m")
    ours = [name for name in arguments.models if name != "none"]
    peers = [peer for peer in arguments.peers if not (on_cpu and peer == "fla")]  # its kernels need a GPU
    dtypes = arguments.dtypes or ["float32" if on_cpu else "bfloat16"]
    for candidate, dtype in product(candidates(SIZES[size], ours, peers), dtypes):
        yield candidate, {"size": size, "model": candidate.model, "library": candidate.library, "dtype": dtype}


def main() -> int:
    """Command line; exit status 1 if a measurement failed."""
    parser = model_options(__doc__)
    parser.add_argument("--shapes", nargs="+", help="training batches, ROWSxTOKENS")
    parser.add_argument("--ways", nargs="+", default=["eager"], choices=("eager", "compile", "packed", *OUR_WAYS))
    parser.add_argument("--steps", type=int, default=10, help="timed training steps")
    arguments = parser.parse_args()
    default = "4x256 1x1024 1x4096" if arguments.device == "cpu" else "8x4096 32x1024 2x16384 1x32768 1x131072"
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes or default.split()]
    settings = list(model_settings(arguments))
    results = Results(arguments)
    for (candidate, names), shape, way in product(settings, shapes, arguments.ways):
        if way in OUR_WAYS and candidate.library != "deltazoo":
            continue
        setting = {**names, "way": way, "batch": shape[0], "tokens": shape[1]}
        try:
            for what, found in measure(candidate, setting, arguments.device, arguments.steps):
                results.add({**setting, "measure": what}, found)
        except Exception as error:  # peers and kernels under test may raise anything
            results.fail({**setting, "measure": "train_tok_s"}, error)
        clear()
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
