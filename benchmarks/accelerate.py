"""Tokens per second of transformers' delta-rule models before and after `deltazoo.accelerate`.

    python -m benchmarks.accelerate --out benchmarks/results/accelerate.json    # real widths, on a GPU
    python -m benchmarks.accelerate --out run.json --device cpu --small              # a quick try on a CPU

Four layers of each model (three of delta rule and one of softmax attention) with the widths of its configuration's
defaults, random weights, and a small vocabulary, so that the head does not hide the layers. MLPs are dense in place of
experts where the family can; Qwen3.5 MoE and Qwen4-Exp have 16 experts. Measured before and after in turns:

    prompt           forward into a new cache
    training         forward and backward
    packed training  the same on packed documents; transformers' own torch code cannot do that: no "before"
    step             one forward pass over one token after the prompt, in eager mode
    generate         `model.generate` of 64 tokens after 128; after: its step is captured, where the family allows it
    loop             the same by `deltazoo.generate`'s loop, beside transformers' `generate`

Training steps of whole models: `python -m benchmarks.models --peers qwen3.5 olmo-hybrid`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import deltazoo
from benchmarks.common import Results, Row, document_positions, now, options, package_version
from deltazoo.generation import Decoder
from deltazoo.generation.cache import CACHE

LAYERS = ["linear_attention"] * 3 + ["full_attention"]
DENSE = {"mlp_layer_types": ["dense"] * 4}
FAMILIES: dict[str, Row] = {  # different kinds first: a run that is cut has some of each
    "qwen3_next": {"mlp_only_layers": [0, 1, 2, 3]},
    "kimi_linear": DENSE,
    "olmo_hybrid": {},
    "qwen4_exp_text": {
        "num_experts": 16,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
    },
    "qwen3_5_text": {},
    "bailing_hybrid": {**DENSE, "num_mtp_layers": 0},
    "glm5_next": DENSE,
    "qwen3_5_moe_text": {"num_experts": 16},
}
COMMON = {
    "num_hidden_layers": 4,
    "layer_types": LAYERS,
    "vocab_size": 32768,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SMALL_KDA = {"linear_num_heads": 4, "linear_head_dim": 64, "kv_lora_rank": 64}
SMALL_GDN = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
KDA = ("kimi_linear", "bailing_hybrid", "glm5_next")
FEWER_TOKENS = {"qwen4_exp_text": 256, "glm5_next": 512}
"""Their sparse softmax layers take long over a prompt: the first runs a Python loop over its tokens."""
VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
ROUNDS = 3
BUDGET = 0.06
"""Seconds of repeats per phase and round."""
PROMPT, NEW_TOKENS = 128, 64
PHASES = ["prompt", "training", "packed training", "step", "generate", "loop"]


class Phase(NamedTuple):
    """What to call, how many tokens a call takes, and what to call before it is measured."""

    name: str
    call: Callable[[], object]
    tokens: int
    warm_up: Callable[[], object] | None = None


def make_model(family: str, small: bool, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of the family with random weights."""
    options = {**COMMON, **FAMILIES[family]}
    if small:
        options |= SMALL | (SMALL_KDA if family in KDA else SMALL_GDN)
    auto_class: Any = AutoModelForCausalLM
    if family == "glm5_next":  # not without a vision tower
        auto_class = AutoModelForImageTextToText
        width = options.get("hidden_size", 4096)
        options = {"text_config": options, "vision_config": {**VISION, "out_hidden_size": width}}
    torch.manual_seed(0)
    with device:  # initialising half a billion weights takes a CPU most of a minute
        return auto_class.from_config(AutoConfig.for_model(family, **options), dtype=dtype)


def measure_family(results: Results, family: str, model: Any, tokens: int) -> None:
    """One row per phase, with tokens per second before and after."""
    config = model.config.get_text_config()
    ids = torch.randint(3, config.vocab_size, (1, tokens), device=model.device)
    setting = {"model": family, "hidden_size": config.hidden_size, "batch": 1, "tokens": tokens}
    setting |= {"dtype": str(model.dtype).removeprefix("torch.")}
    samples: dict[str, dict[str, list[Row]]] = {phase: {"before": [], "after": []} for phase in PHASES}
    report = deltazoo.accelerate(model)
    for _ in range(ROUNDS):  # in turns, so that a slow minute of the machine slows both
        deltazoo.restore(model)
        measure(model, ids, samples, "before")
        deltazoo.accelerate(model)
        measure(model, ids, samples, "after")
    samples["loop"]["before"] = samples["generate"]["before"]
    about = {"parameters": model.num_parameters(), "backend": report.layers[0].backend}
    about["decoding"] = deltazoo.report(model.eval()).decoding
    for phase, found in samples.items():
        summaries = {when: summary(taken) for when, taken in found.items()}
        results.add({**setting, "phase": phase}, {**summaries, **about})


def measure(model: Any, ids: torch.Tensor, results: dict[str, dict[str, list[Row]]], when: str) -> None:
    """Add one sample per phase: tokens per second and peak memory, or why there is none."""
    for phase in phases(model, ids, accelerated=when == "after"):
        try:
            sample = measured(phase, ids.device)
        except torch.OutOfMemoryError as error:
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            sample = {"error": f"out of memory: {str(error).splitlines()[0]}"}
        except (NotImplementedError, ValueError) as error:
            sample = {"error": f"refused: {error}"}
        results[phase.name][when].append(sample)


def measured(phase: Phase, device: torch.device) -> Row:
    """Tokens per second of warm calls one after another, and the most memory that a call takes."""
    (phase.warm_up or phase.call)()
    sample: Row = {}
    if device.type == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    began = now(device)
    phase.call()
    first = now(device) - began
    if device.type == "cuda":
        sample["peak_mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    count = min(max(int(BUDGET / first), 1), 50)
    began = now(device)
    for _ in range(count):
        phase.call()
    return {"tokens_per_s": phase.tokens * count / (now(device) - began), **sample}


def summary(samples: list[Row]) -> Row | None:
    """Median, least and most over the rounds."""
    failed = [sample for sample in samples if "error" in sample]
    if not samples or failed:
        return failed[0] if failed else None
    speeds = [sample["tokens_per_s"] for sample in samples]
    result = {"tokens_per_s": statistics.median(speeds), "low": min(speeds), "high": max(speeds)}
    return result | ({"peak_mib": samples[-1]["peak_mib"]} if "peak_mib" in samples[-1] else {})


def phases(model: Any, ids: torch.Tensor, *, accelerated: bool) -> Iterator[Phase]:
    """All that is measured of a model as it is."""

    def prompt() -> Any:
        return model(input_ids=ids, use_cache=True, logits_to_keep=1)[CACHE]

    def train(**packing: Any) -> None:
        model(input_ids=ids, labels=ids, use_cache=False, **packing).loss.backward()
        model.zero_grad(set_to_none=True)

    with inference(model):
        yield Phase("prompt", prompt, ids.numel())
    yield Phase("training", train, ids.numel())
    if accelerated:
        positions = document_positions(ids.numel(), ids.device)
        yield Phase("packed training", partial(train, position_ids=positions), ids.numel())
    with inference(model):
        step = partial(model, input_ids=ids[:, :1], **{CACHE: prompt()})
        yield Phase("step", step, ids.shape[0])
        yield from decoding(model, ids[:, :PROMPT], accelerated=accelerated)


def decoding(model: Any, prompt: torch.Tensor, *, accelerated: bool) -> Iterator[Phase]:
    """Greedy decoding by transformers' loop and, of an accelerated model, by ours."""
    mask, made = torch.ones_like(prompt), len(prompt) * NEW_TOKENS

    def generate(new_tokens: int) -> torch.Tensor:
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new_tokens}
        return model.generate(prompt, attention_mask=mask, **options)

    yield Phase("generate", partial(generate, NEW_TOKENS), made, partial(generate, 4))
    if not accelerated:
        return
    decoders: list[Decoder] = []

    def loop(new_tokens: int) -> None:
        if not decoders:
            length = prompt.shape[1] + NEW_TOKENS
            decoders.append(Decoder(model, len(prompt), max_length=length, eos_token_id=[], pad_token_id=0))
        for _ in decoders[0].stream(prompt, max_new_tokens=new_tokens):
            pass

    yield Phase("loop", partial(loop, NEW_TOKENS), made, partial(loop, 4))


@contextmanager
def inference(model: Any) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def main() -> int:
    """Command line; exit status 1 if a family failed."""
    parser = options(__doc__)
    parser.add_argument("--small", action="store_true", help="narrow models, for a quick try")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--tokens", type=int, help="of the row (default: 4096, small: 512, some: fewer)")
    arguments = parser.parse_args()
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    results = Results(arguments)
    for family in arguments.families:
        if family not in CONFIG_MAPPING:
            print(f"transformers {package_version('transformers')} has no {family}: left out", file=sys.stderr)
            continue
        tokens = arguments.tokens or FEWER_TOKENS.get(family, 512 if arguments.small else 4096)
        model = make_model(family, arguments.small, torch.device(arguments.device), dtype)
        measure_family(results, family, model, tokens)
        del model
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
