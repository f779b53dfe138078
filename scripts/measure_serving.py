"""Tokens per second and time to first token of the serving engine, beside `deltazoo.generate`. Meant for a GPU.

    python scripts/measure_serving.py --out benchmarks/results/serving_h200.json --commit $(git rev-parse HEAD)

A DeltaNet of 374 M parameters with random weights, bfloat16, greedy. All clients send a prompt of 1,024 tokens of their
own at the same moment, and read their streams as coroutines of one event loop, as behind an HTTP server. The clock runs
from the first request to the last token. `generate` gets the same prompts as one batch; its step is captured before the
clock starts, and so are those of the engine. `parts` are single operations of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from deltazoo.generation import Decoder, Sampling
from deltazoo.generation.row_sampling import Way
from deltazoo.workbench.bench.model_candidates import SIZES, candidates
from deltazoo.workbench.provenance import describe_run
from deltazoo.workbench.serve import Engine, Request, Stream

WIDTHS = (1, 16, 64, 256)


def build_model(size: str, device: str) -> Any:
    """A DeltaNet with random weights, as configs/delta_net_340m.yaml has it, that never ends an answer by itself."""
    (candidate,), _ = candidates(SIZES[size], ["delta_net"], [], device)
    torch.manual_seed(0)
    with torch.device(device):
        model = candidate.build().to(torch.bfloat16 if device.startswith("cuda") else torch.float32).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One made-up word per token."""
    backend = Tokenizer(models.WordLevel({f"▁w{number}": number for number in range(vocabulary)}, unk_token="▁w0"))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def prompts_of(count: int, length: int, vocabulary: int, seed: int) -> list[tuple[int, ...]]:
    drawn = random.Random(seed)
    return [tuple(drawn.choices(range(vocabulary), k=length)) for _ in range(count)]


async def read(stream: Stream, began: float) -> tuple[float, float, int]:
    """Seconds to the first and the last token, and their number."""
    first, count = 0.0, 0
    async for piece in stream:
        first = first or time.perf_counter() - began
        count += len(piece.token_ids)
    return first, time.perf_counter() - began, count


def serve(engine: Engine, prompts: list[tuple[int, ...]], **options: Any) -> dict[str, float]:
    """All prompts at once."""

    async def clients() -> list[tuple[float, float, int]]:
        began = time.perf_counter()
        readers = []
        for prompt in prompts:
            readers.append(asyncio.ensure_future(read(engine.submit(Request(prompt=prompt, **options)), began)))
            await asyncio.sleep(0)
        return await asyncio.gather(*readers)

    firsts, lasts, counts = zip(*asyncio.run(clients()), strict=True)
    assert set(counts) == {options["max_tokens"]}, counts
    ordered = sorted(firsts)
    return {
        "tokens_per_second": sum(counts) / max(lasts),
        "seconds": max(lasts),
        "first_token_p50": statistics.median(ordered),
        "first_token_p99": ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))],
    }


def generate(model: Any, prompts: list[tuple[int, ...]], new_tokens: int) -> dict[str, float]:
    """The same as one batch."""
    decoder = Decoder(model, len(prompts))
    ids = torch.tensor(prompts, device=model.device)
    list(decoder.stream(ids, max_new_tokens=4))
    began = time.perf_counter()
    steps = decoder.stream(ids, max_new_tokens=new_tokens)
    next(steps)
    first = time.perf_counter() - began
    count = 1 + sum(1 for _ in steps)
    seconds = time.perf_counter() - began
    return {"tokens_per_second": count * len(prompts) / seconds, "seconds": seconds, "first_token": first}


def conversation(engine: Engine, length: int, vocabulary: int) -> dict[str, float]:
    """Seconds to the first token of a second turn behind a long first one, and of the same prompt without its past."""
    prompt = prompts_of(1, length, vocabulary, 99)[0]
    options: dict[str, Any] = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True}
    answer = [token for piece in engine.submit(Request(prompt=prompt, **options)) for token in piece.token_ids]
    second = (*prompt, *answer, *prompts_of(1, 32, vocabulary, 100)[0])
    hit = serve(engine, [second], **options)["first_token_p50"]
    unknown = (prompt[0] + 1, *second[1:]) if prompt[0] + 1 < vocabulary else (0, *second[1:])
    miss = serve(engine, [unknown], **options)["first_token_p50"]
    return {"past_tokens": length, "first_token_hit": hit, "first_token_miss": miss}


def part_times(engine: Engine, piece: list[int]) -> Iterator[tuple[str, float]]:
    """Milliseconds of single operations, the host's and the device's together, of an engine without requests."""
    table, prompts = engine.table, engine.prompts
    for width in table.widths:
        for way in Way:
            yield f"step of {width}, {way.name.lower()}", milliseconds(partial(table.step, width, way), 30)
    for length in (prompts.piece, prompts.piece - 1):
        everywhere = {row: (0, piece[:length]) for row in range(prompts.rows)}
        yield f"pass of {prompts.rows} x {length}", milliseconds(partial(prompts.run, everywhere), 10)
    state = prompts.take(0, 0)
    yield "take a state", milliseconds(lambda: prompts.take(0, 0), 20)
    yield "load a state", milliseconds(lambda: prompts.load(0, state), 20)
    yield "put a row", milliseconds(lambda: table.put(0, state, 0, 0, Sampling(), 0), 20)


def milliseconds(function: Callable[[], Any], repeats: int) -> float:
    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    function()
    wait()
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    wait()
    return 1e3 * (time.perf_counter() - began) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="read from git unless given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="340m", choices=SIZES)
    parser.add_argument("--clients", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--piece", type=int, default=512)
    parser.add_argument("--prompt-rows", type=int)
    args = parser.parse_args()

    run = describe_run(device=args.device, commit=args.commit, command=[])
    content: dict[str, Any] = {
        "run": asdict(run),
        "model": {"mixer": "delta_net", **vars(SIZES[args.size])},
        "prompt": args.prompt,
        "new_tokens": args.new_tokens,
        "piece": args.piece,
        "parts": {},
        "rows": [],
    }

    def record(name: str, values: dict[str, Any]) -> None:
        content["rows"].append({"what": name, **values})
        print(name, {key: round(x, 4) if isinstance(x, float) else x for key, x in values.items()}, flush=True)
        args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    model = build_model(args.size, args.device)
    vocabulary = model.config.vocab_size
    began = time.perf_counter()
    engine = Engine(
        model,
        word_tokenizer(vocabulary),
        widths=sorted({*args.clients}),
        prompt_piece=args.piece,
        prompt_rows=args.prompt_rows,
    )
    engine.start()
    record("start", {"seconds": time.perf_counter() - began, "prompt_rows": engine.prompts.rows})
    options = {"max_tokens": args.new_tokens, "ignore_eos": True}
    greedy, drawn = {"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95}
    serve(engine, prompts_of(2, args.prompt, vocabulary, 7), max_tokens=4, **greedy)  # kernels are compiled
    for clients in args.clients:
        prompts = prompts_of(clients, args.prompt, vocabulary, clients)
        values = serve(engine, prompts, **options, **greedy)
        record("engine", {"clients": clients, **values})
        record("generate", {"clients": clients, **generate(model, prompts, args.new_tokens)})
    record("conversation", conversation(engine, 8 * args.prompt, vocabulary))
    sampled = serve(engine, prompts_of(args.clients[-1], args.prompt, vocabulary, 0), **options, **drawn)
    record("engine, top_p 0.95", {"clients": args.clients[-1], **sampled})
    content["counters"] = asdict(engine.status().counters)
    engine.stop()
    for name, value in part_times(engine, [1] * args.piece):
        content["parts"][name] = value
        print(name, round(value, 3), flush=True)
    args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
