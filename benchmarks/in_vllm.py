"""Tokens per second of our models inside vLLM, beside our own engine and `deltazoo.generate`, by streams at once.

    python -m benchmarks.in_vllm --out benchmarks/results/in_vllm_h200.json
    python -m benchmarks.in_vllm --out run.json --device cpu --size quickstart --streams 1 4 --prompt 40 --new 8

Greedy, random weights of bfloat16, all prompts of one length and other ones in every repeat, prefix caches unused. What
was measured, the best of two: `with_prompts`, new tokens per second of the whole; `decoding`, the same less the time of
as many requests for one token. Neither HTTP nor text is part of it: vLLM by its `LLM`, whose engine is a process of its
own, our engine in this process.

`--profile` runs vLLM in this process instead, and prints where the host's time goes.
"""

from __future__ import annotations

import cProfile
import gc
import itertools
import os
import pstats
import queue
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import deltazoo
from benchmarks.common import Results, now, options
from benchmarks.models import SIZES, candidates
from deltazoo.serving import Engine, Request

Prompts = list[list[int]]
Run = Callable[[Prompts, int], list[list[int]]]
"""New tokens for each of some prompts."""


class NoText:
    """A tokenizer for engines whose texts nobody reads."""

    eos_token_id, is_fast = None, False

    def decode(self, tokens: list[int], **_: Any) -> str:
        """Nothing."""
        return ""


def in_generate(model: Any, asked: Any) -> Iterator[Run]:
    """`deltazoo.generate` of one batch."""

    def run(prompts: Prompts, new: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=model.device)
        return deltazoo.generate(model, ids, max_new_tokens=new, eos_token_id=[])[:, ids.shape[1] :].tolist()

    yield run


def in_our_engine(model: Any, asked: Any) -> Iterator[Run]:
    """The engine of `deltazoo serve`."""
    limit = asked.prompt + asked.new + 1
    engine = Engine(model, NoText(), widths=asked.streams, max_queue=1024, context_limit=limit, prefix_memory=0)

    def run(prompts: Prompts, new: int) -> list[list[int]]:
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        found: list[list[int]] = [[] for _ in prompts]

        def deliver(outputs: Any) -> None:
            for output in outputs:
                done.put(output)

        requests = [Request(prompt=tuple(p), max_tokens=new, temperature=0.0, seed=0) for p in prompts]
        engine.enter(list(enumerate(requests)), deliver)
        left = len(prompts)
        while left:
            key, output = done.get()
            if isinstance(output, Exception):
                raise output
            if isinstance(output, int):
                found[key].append(output)
            else:
                found[key] += output.token_ids
                left -= output.finish_reason is not None
        return found

    with engine:
        yield run


def in_vllm(path: Path, asked: Any) -> Iterator[Run]:
    """vLLM with this package's plugin; its settings but for the sizes."""
    from vllm import LLM, SamplingParams

    graphs: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": asked.streams}}
    graphs |= {"gpu_memory_utilization": 0.5}
    llm = LLM(
        str(path), skip_tokenizer_init=True, enable_prefix_caching=False, max_num_seqs=max(asked.streams),
        max_model_len=asked.prompt + asked.new + 1, **({"enforce_eager": True} if asked.device == "cpu" else graphs),
    )  # fmt: skip

    def run(prompts: Prompts, new: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return [list(x.outputs[0].token_ids) for x in found]

    yield run


def measure(results: Results, setting: dict[str, Any], run: Run, asked: Any, seeds: Iterator[int], vocab: int) -> None:
    """Rows of one way to decode, by streams."""

    def seconds(streams: int, new: int) -> float:
        generator = torch.Generator().manual_seed(next(seeds))
        prompts = torch.randint(vocab, (streams, asked.prompt), generator=generator).tolist()
        began = now(asked.device)
        found = run(prompts, new)
        taken = now(asked.device) - began
        if [len(tokens) for tokens in found] != [new] * streams:
            raise RuntimeError(f"asked {streams} streams for {new} tokens each, got {[len(x) for x in found]}")
        return taken

    for streams in asked.streams:
        seconds(streams, 4)
        whole = min(seconds(streams, asked.new) for _ in range(2))
        first = min(seconds(streams, 1) for _ in range(2))
        row = {**setting, "streams": streams, "prompt": asked.prompt, "new": asked.new}
        results.add({**row, "measure": "with_prompts"}, streams * asked.new / whole)
        results.add({**row, "measure": "decoding"}, streams * (asked.new - 1) / (whole - first))


@torch.no_grad()
def main() -> int:
    """Command line; exit status 1 if a measurement failed."""
    parser = options(__doc__)
    parser.add_argument("--rules", nargs="+", default=["gated_deltanet", "kda"])
    parser.add_argument("--size", choices=sorted(SIZES), default="340m")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each stream")
    parser.add_argument("--ways", nargs="+", default=["generate", "engine", "vllm"])
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    if asked.profile:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    results, seeds = Results(asked), itertools.count()
    if "vllm" in asked.ways:
        import vllm

        results.run["vllm"] = vllm.__version__
    for rule in asked.rules:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            (candidate,) = candidates(SIZES[asked.size], [rule], [])
            with torch.device(asked.device):
                model = candidate.build().eval().to(torch.bfloat16 if asked.device == "cuda" else torch.float32)
            for one in (model.config, model.generation_config):
                one.bos_token_id = one.eos_token_id = one.pad_token_id = None
            model.save_pretrained(folder)
            vocab = model.config.vocab_size
            for way in asked.ways:
                make: Any = {"generate": in_generate, "engine": in_our_engine, "vllm": in_vllm}[way]
                running = make(Path(folder) if way == "vllm" else model, asked)
                profile = cProfile.Profile()
                try:
                    run = next(running)
                    run = partial(profile.runcall, run) if asked.profile else run
                    measure(results, {"rule": rule, "size": asked.size, "way": way}, run, asked, seeds, vocab)
                except Exception as error:  # vLLM may refuse the machine
                    results.fail({"rule": rule, "size": asked.size, "way": way, "measure": "with_prompts"}, error)
                del running
                gc.collect()
                if asked.profile:
                    pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
