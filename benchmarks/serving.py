"""Throughput and time to the first token of servers with OpenAI's API, under many clients at once, on one GPU.

    python -m benchmarks.serving --out benchmarks/results/serving_http_h200.json
    python -m benchmarks.serving --out run.json --device cpu --size quickstart --clients 1 2    # a rehearsal

It saves two models with random weights (Gated DeltaNet of about 370 M parameters, and transformers' Qwen3-Next)
and a tokenizer of Python's standard library, starts servers, and asks them one after the other: `deltazoo serve` on
both, and `transformers serve`, which answers one request at a time, as its continuous batching refuses linear layers.
Beside them `deltazoo.generate` on one batch of as many rows as there are clients.

Every client streams `--rounds` completions, one after another: a slice of the standard library as prompt, a fixed
number of new tokens, greedy. Tokens are those that the server reports. The time to the first token runs from sending
the request to the first chunk with text. Needs the extras serve and test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from benchmarks.common import Results, Row, options


@dataclass(frozen=True)
class Asked:
    """One request: seconds of the system's clock, and numbers of tokens."""

    sent: float
    first: float
    ended: float
    prompt_tokens: int
    new_tokens: int
    error: str | None = None


def library_text(size: int) -> str:
    """The beginning of Python's standard library."""
    parts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="ignore"))
        if sum(map(len, parts)) > size:
            break
    return "".join(parts)[:size]


class Prompts:
    """Parts of the standard library, all of one length in tokens, each given out once.

    Args:
        tokenizer: folder of a model, or of a tokenizer alone.
        length: tokens of a prompt, the one that begins a text included.
    """

    def __init__(self, tokenizer: Path, length: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self.length = length - 1
        text, part = library_text(12_000_000), 100_000
        parts = [text[start : start + part] for start in range(0, len(text), part)]  # so all processors take part
        encoded = self.tokenizer.encode_batch(parts, add_special_tokens=False)
        self._ids = [token for tokens in encoded for token in tokens.ids]
        self._next = 0

    def take(self, number: int) -> list[str]:
        """The texts of the next `number` prompts."""
        texts = []
        for _ in range(number):
            if self._next + self.length > len(self._ids):
                self._next = self.length // 2  # other parts than before
            texts.append(self.tokenizer.decode(self._ids[self._next : self._next + self.length]))
            self._next += self.length
        return texts


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Asked:
    sent, first, usage, seen = time.monotonic(), 0.0, None, b""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                return Asked(sent, 0.0, time.monotonic(), 0, 0, f"{response.status_code}: {text[:200]}")
            async for part in response.aiter_raw():
                # Decoding every event would measure this client: only the first text and the end are read.
                first = first or (time.monotonic() if b'"text":' in part else 0.0)
                seen = (seen + part)[-4096:]
    except httpx.HTTPError as error:
        return Asked(sent, 0.0, time.monotonic(), 0, 0, f"{type(error).__name__}: {error}")
    ended = time.monotonic()
    for line in seen.split(b"\n"):
        if line.startswith(b"data: {") and (found := _usage(line[6:])):
            usage = found
    if usage is None:
        return Asked(sent, first, ended, 0, 0, f"the stream ended without usage: {seen[-200:]!r}")
    return Asked(sent, first, ended, usage["prompt_tokens"], usage["completion_tokens"])


def _usage(event: bytes) -> dict[str, int] | None:
    try:
        return json.loads(event).get("usage")
    except ValueError:  # the event began before the part that was kept
        return None


async def _clients(url: str, prompts: list[list[str]], body: dict[str, Any], start: float) -> list[Asked]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:

        async def one(texts: list[str]) -> list[Asked]:
            await asyncio.sleep(max(0.0, start - time.monotonic()))
            return [await _ask(client, {**body, "prompt": text}) for text in texts]

        return [asked for found in await asyncio.gather(*map(one, prompts)) for asked in found]


def _run_clients(url: str, prompts: list[list[str]], body: dict[str, Any], start: float) -> list[Asked]:
    return asyncio.run(_clients(url, prompts, body, start))


def load(
    url: str, clients: int, rounds: int, processes: int, source: Prompts, body: Row, pool: ProcessPoolExecutor
) -> Row:
    """What `clients` at once find, each asking `rounds` times."""
    texts = source.take(clients * rounds)
    prompts = [texts[client * rounds : (client + 1) * rounds] for client in range(clients)]
    start = time.monotonic() + 0.5
    shares = [share for number in range(processes) if (share := prompts[number::processes])]
    jobs = [pool.submit(_run_clients, url, share, body, start) for share in shares]
    asked = [entry for job in jobs for entry in job.result()]
    good = [entry for entry in asked if entry.error is None]
    row: Row = {"requests": len(asked), "failed": len(asked) - len(good)}
    if len(good) < len(asked):
        row["first_error"] = next(entry.error for entry in asked if entry.error is not None)
    if good:
        seconds = max(entry.ended for entry in good) - min(entry.sent for entry in good)
        waits = sorted(entry.first - entry.sent for entry in good)
        row |= {
            "seconds": seconds,
            "new_tokens": sum(entry.new_tokens for entry in good),
            "tokens_per_second": sum(entry.new_tokens for entry in good) / seconds,
            "prompt_tokens_median": statistics.median(entry.prompt_tokens for entry in good),
            "first_token_p50": waits[len(waits) // 2],
            "first_token_p99": waits[min(len(waits) - 1, int(0.99 * len(waits)))],
            "request_p50": statistics.median(entry.ended - entry.sent for entry in good),
        }
    return row


def wait_for(urls: list[str], seconds: float) -> None:
    """Return once servers answer."""
    end = time.monotonic() + seconds
    while silent := [url for url in urls if not _answers(url)]:
        if time.monotonic() > end:
            raise TimeoutError(f"no server after {seconds:.0f} s at {', '.join(silent)}")
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def save_models(folder: Path, size: str, device: str) -> None:
    """Two models with random weights in bfloat16 (on a CPU float32), and a tokenizer of their vocabulary."""
    import torch

    from benchmarks.models import SIZES, candidates
    from deltazoo.training.tokens import train_bpe

    tokenizer = train_bpe([library_text(12_000_000)], SIZES[size].vocab_size)
    for candidate in candidates(SIZES[size], ["gated_deltanet"], ["qwen3-next"]):
        if candidate.library != "accelerated":
            torch.manual_seed(0)
            with torch.device(device):
                model = candidate.build().eval().to(torch.float32 if device == "cpu" else torch.bfloat16)
            for config in (model.config, model.generation_config):
                config.bos_token_id = config.eos_token_id = config.pad_token_id = None
            model.save_pretrained(folder / candidate.model)
            tokenizer.save_pretrained(folder / candidate.model)


def measure_generate(results: Results, path: Path, arguments: argparse.Namespace) -> None:
    """Tokens per second of `deltazoo.generate`, prompts included and not, on as many rows as there are clients."""
    import torch
    from transformers import AutoModelForCausalLM

    from deltazoo.generation import Decoder

    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(arguments.device).eval()
    source = Prompts(path, arguments.prompt_tokens)
    for rows in arguments.clients:
        encoded = [source.tokenizer.encode(text).ids[: arguments.prompt_tokens] for text in source.take(rows)]
        length = min(map(len, encoded))
        ids = torch.tensor([tokens[:length] for tokens in encoded], device=arguments.device)
        decoder = Decoder(model, rows, max_length=length + arguments.new_tokens, eos_token_id=[])
        for _ in decoder.stream(ids, max_new_tokens=4):
            pass
        times = [time.monotonic()]
        for _ in decoder.stream(ids, max_new_tokens=arguments.new_tokens):
            times.append(time.monotonic())
        found = {
            "prompt_tokens": length,
            "tokens_per_second": rows * arguments.new_tokens / (times[-1] - times[0]),
            "tokens_per_second_without_prompts": rows * (arguments.new_tokens - 1) / (times[-1] - times[1]),
            "first_token": times[1] - times[0],
        }
        results.add({"label": "deltazoo.generate", "clients": rows}, found)


def ask(
    results: Results, label: str, url: str, model: str, tokenizer: Path, clients: list[int], arguments: Any,
    rounds: int | None = None, processes: int | None = None,
) -> None:  # fmt: skip
    """Rows of one server, after a warm-up."""
    body = {"model": model, "max_tokens": arguments.new_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    source, processes = Prompts(tokenizer, arguments.prompt_tokens), processes or arguments.processes
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        share = (processes, source, body, pool)
        print("warm-up", load(url, processes, 1, *share), flush=True)
        for number in clients:
            found = load(url, number, rounds or arguments.rounds, *share)
            results.add({"label": label, "clients": number}, found)


@contextmanager
def servers(commands: list[list[str]], seconds: float) -> Iterator[list[str]]:
    """Addresses of servers that run in the meantime; each command gets a port. One that starts slows the others."""
    urls = [f"http://127.0.0.1:{18001 + number}" for number in range(len(commands))]
    started = [
        subprocess.Popen([sys.executable, "-m", *command, "--port", url.rpartition(":")[2]])
        for command, url in zip(commands, urls, strict=True)
    ]
    try:
        wait_for(urls, seconds)
        yield urls
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def measure_all(results: Results, arguments: argparse.Namespace) -> None:
    """Both models on our server, `generate`, and transformers' server last: the slowest, one request at a time."""
    widths = "1,2,4,8,16,32,64,128,256"
    with tempfile.TemporaryDirectory() as name:
        folder, device = Path(name), ["--device", arguments.device]
        save_models(folder, arguments.size, arguments.device)
        ours, qwen = folder / "gated_deltanet", folder / "qwen3-next"
        serve = ["deltazoo", "serve", "--name", "served", "--max-queue", "1024", *device]
        commands = [
            [*serve, str(ours), "--widths", widths],
            [*serve, str(qwen), "--context-limit", "2048"],
            ["transformers.cli.transformers", "serve", str(qwen), *device],
        ]
        with servers(commands, arguments.wait) as urls:
            few = [number for number in arguments.clients if number <= 64]
            label = f"gated_deltanet, deltazoo serve --widths {widths}"
            ask(results, label, urls[0], "served", ours, arguments.clients, arguments)
            ask(results, "qwen3-next, deltazoo serve --context-limit 2048", urls[1], "served", qwen, few, arguments)
            measure_generate(results, ours, arguments)
            ask(results, "qwen3-next, transformers serve", urls[2], str(qwen), qwen, [1, 4], arguments, 1, 1)


def main() -> int:
    """Command line."""
    parser = options(__doc__)
    parser.add_argument("--size", default="340m", help="of the models, as in benchmarks.models")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1), help="that the clients run in")
    parser.add_argument("--wait", type=float, default=300.0, help="seconds that servers may take to start")
    arguments = parser.parse_args()
    results = Results(arguments)
    measure_all(results, arguments)
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
