"""Decoding of whole models beside peers: new tokens per second by batch, and one more token by length of the context.

    python -m benchmarks.decoding --out benchmarks/results/models_h200.json
    python -m benchmarks.decoding --out run.json --models kda --peers swapped qwen3-next --measure decode --batches 1 64

Greedy, random weights. What was measured:

    decode_tok_s                      new tokens per second after a prompt of 16 tokens, all rows together
    prefill_tok_s                     prompt tokens per second, in pieces of 8,192
    token_ms, context_peak_gib        one more token after a context; peak memory of both, model included

Ways to decode: `generate` is the model's method, which captures its step on a GPU if it is ours; `generate-plain` the
same with capture_step=False; `loop` is `deltazoo.generate`. A context is decoded by `loop`, and of other libraries by a
loop over their forward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Results, Row, Spread, clock_for
from benchmarks.models import Candidate, clear, model_options, model_settings
from deltazoo.generation import Decoder
from deltazoo.generation.cache import CACHE

WAYS = ("generate", "generate-plain", "loop")
WAYS_OF = {"deltazoo": WAYS, "accelerated": ("generate", "loop")}
WARM_UP = 4
"""Tokens before the clock starts."""
PIECE = 8192
"""Tokens of a prompt per forward pass."""


def prepared(candidate: Candidate, setting: Row, device: str) -> tuple[Any, Tensor]:
    """The model, which ends at no token, and a prompt."""
    torch.manual_seed(0)
    with torch.device(device):
        model = candidate.build().to(getattr(torch, setting["dtype"])).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model, torch.randint(0, model.config.vocab_size, (setting["batch"], setting["tokens"]), device=device)


@torch.no_grad()
def measure_decoding(candidate: Candidate, setting: Row, device: str, new_tokens: int) -> Iterator[tuple[str, Any]]:
    """Tokens per second after a short prompt."""
    model, ids = prepared(candidate, setting, device)
    batch = len(ids)
    if setting["way"].startswith("loop"):
        gaps = gaps_between(our_steps(model, ids, setting, WARM_UP + new_tokens), device)[WARM_UP:]
        # Over all gaps, as transformers' method is timed, with the percentiles of single ones.
        yield "decode_tok_s", vars(Spread.of(gaps).rate_of(batch)) | {"value": batch * len(gaps) / sum(gaps)}
        return
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
    options |= {"capture_step": False} if setting["way"] == "generate-plain" else {}
    model.generate(ids, max_new_tokens=WARM_UP, **options)
    clock = clock_for(device)
    began = clock()
    model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options)
    if device != "cpu":
        torch.cuda.synchronize()
    yield "decode_tok_s", batch * new_tokens / (clock() - began)


@torch.no_grad()
def measure_context(candidate: Candidate, setting: Row, device: str, new_tokens: int) -> Iterator[tuple[str, Any]]:
    """Reading a context, and further tokens after it."""
    model, ids = prepared(candidate, setting, device)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    steps = (our_steps if setting["way"] == "loop" else plain_steps)(model, ids, setting, WARM_UP + new_tokens)
    clock = clock_for(device)
    began = clock()
    next(steps)
    yield "prefill_tok_s", ids.numel() / (clock() - began)
    yield "token_ms", Spread.of(gaps_between(steps, device)[WARM_UP - 1 :]).times(1e3)
    if device != "cpu":
        yield "context_peak_gib", torch.cuda.max_memory_allocated() / 2**30


def our_steps(model: Any, ids: Tensor, setting: Row, new_tokens: int) -> Iterator[Tensor]:
    """`deltazoo.generate`, token by token."""
    length = ids.shape[1] + new_tokens
    decoder = Decoder(model, len(ids), max_length=length, prefill_chunk=PIECE)
    return decoder.stream(ids, max_new_tokens=new_tokens)


def plain_steps(model: Any, ids: Tensor, setting: Row, new_tokens: int) -> Iterator[Tensor]:
    """Greedy tokens of any causal model, with the prompt in pieces and the model's own cache."""
    cache = None
    for piece in ids.split(PIECE, dim=1):
        output = model(piece, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        cache = getattr(output, CACHE)
    for _ in range(new_tokens):
        token = output.logits[:, -1:].argmax(-1)
        yield token[:, 0].cpu()
        output = model(token, use_cache=True, **{CACHE: cache})


def gaps_between(steps: Iterator[Tensor], device: str) -> list[float]:
    """Seconds between one token and the next; a token is there once the device has made it."""
    clock = clock_for(device)
    times = [clock()]
    times += [clock() for _ in steps]
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def main() -> int:
    """Command line; exit status 1 if a measurement failed."""
    parser = model_options(__doc__)
    parser.add_argument("--measure", nargs="+", default=["decode", "context"], choices=("decode", "context"))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256], help="rows while decoding")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 65536, 262144, 1000000])
    parser.add_argument("--ways", nargs="+", default=["generate", "generate-plain", "loop"], choices=WAYS)
    parser.add_argument("--new-tokens", type=int, default=100, help="timed tokens")
    arguments = parser.parse_args()
    cases = []
    for candidate, names in model_settings(arguments):
        ways = [way for way in arguments.ways if way in WAYS_OF.get(candidate.library, ("generate",))]
        if "decode" in arguments.measure:
            for batch, way in product(arguments.batches, ways):
                setting = {**names, "way": way, "batch": batch, "tokens": 16}
                cases.append((candidate, setting, measure_decoding, "decode_tok_s"))
        if "context" in arguments.measure:
            way = "loop" if candidate.library in WAYS_OF else "generate"
            for tokens in arguments.contexts:
                setting = {**names, "way": way, "batch": 1, "tokens": tokens}
                cases.append((candidate, setting, measure_context, "token_ms"))
    results = Results(arguments)
    for candidate, setting, measure, first in cases:
        try:
            for what, found in measure(candidate, setting, arguments.device, arguments.new_tokens):
                results.add({**setting, "measure": what}, found)
        except Exception as error:  # peers and kernels under test may raise anything
            results.fail({**setting, "measure": first}, error)
        clear()
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
