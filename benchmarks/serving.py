"""Throughput and time to the first token of a server with OpenAI's API, under many clients at once.

    scripts/load_servers.sh benchmarks/results/serving_http_h200.json COMMIT

calls all parts of this script. `model` saves a model of about 370 M parameters with random weights, a Gated DeltaNet or
transformers' Qwen3-Next, and a tokenizer of Python's standard library. `wait` waits for servers, `load` asks one from
several processes. Any server with OpenAI's API will do: transformers' own answers one request at a time, as its
continuous batching refuses linear layers. `generate` times `deltazoo.generate` on batches of as many rows as there are
clients. `load` and `generate` add to a result file.

Every client streams one completion after another: a slice of the standard library as prompt, a fixed number of new
tokens, greedy. Tokens are those that the server reports. The time to the first token runs from sending the request to
the first chunk with text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

COUNTERS = {"deltazoo_steps_total": "steps", "deltazoo_pieces_total": "pieces"}


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
    url: str,
    clients: int,
    rounds: int,
    processes: int,
    source: Prompts,
    body: dict[str, Any],
    pool: ProcessPoolExecutor,
) -> dict[str, Any]:
    """One row of results: `clients` at once, each asking `rounds` times."""
    texts = source.take(clients * rounds)
    prompts = [texts[client * rounds : (client + 1) * rounds] for client in range(clients)]
    before = counted(url)
    start = time.monotonic() + 0.5
    shares = [share for number in range(processes) if (share := prompts[number::processes])]
    jobs = [pool.submit(_run_clients, url, share, body, start) for share in shares]
    asked = [entry for job in jobs for entry in job.result()]
    good = [entry for entry in asked if entry.error is None]
    row: dict[str, Any] = {"clients": clients, "requests": len(asked), "failed": len(asked) - len(good)}
    row |= {name: value - before[name] for name, value in counted(url).items()}
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


def counted(url: str) -> dict[str, float]:
    """What our server counts of its steps and pieces of prompts; nothing for another server."""
    lines = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text.splitlines()
    values = {name: line.split()[-1] for line in lines for name in COUNTERS if line.startswith(name + "{")}
    return {COUNTERS[name]: float(value) for name, value in values.items()}


def wait_for(urls: list[str], seconds: float) -> None:
    """Return once servers answer."""
    end = time.monotonic() + seconds
    while silent := [url for url in urls if not _answers(url)]:
        if time.monotonic() > end:
            sys.exit(f"no server after {seconds:.0f} s at {', '.join(silent)}")
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def save_model(folder: Path, device: str, kind: str, size: str) -> None:
    """A model with random weights in bfloat16 (on a CPU float32), and a tokenizer of its vocabulary."""
    import torch

    from benchmarks.model_candidates import SIZES, candidates
    from deltazoo.training.text import Document
    from deltazoo.training.tokenizer import train_bpe

    taking_part, _ = candidates(SIZES[size], ["gated_deltanet"], ["qwen3-next"], device)
    torch.manual_seed(0)
    candidate = next(candidate for candidate in taking_part if candidate.model.replace("-", "_") == kind)
    with torch.device(device):
        model = candidate.build().eval()
    if device != "cpu":
        model.to(torch.bfloat16)
    for config in (model.config, model.generation_config):
        config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model.save_pretrained(folder)
    text = Document("library", library_text(12_000_000), "library")
    train_bpe([text], SIZES[size].vocab_size).save_pretrained(folder)
    print(f"{model.num_parameters() / 1e6:.0f} M parameters, in {folder}")


def generate_rows(
    path: Path, device: str, rows: list[int], prompt_tokens: int, new_tokens: int
) -> Iterator[dict[str, Any]]:
    """Tokens per second of `deltazoo.generate`, prompts included and not, on as many rows as there are clients."""
    import torch

    from deltazoo.generation import Decoder
    from deltazoo.serving.model_loading import load_for_serving

    model, tokenizer = load_for_serving(str(path), device)
    source = Prompts(path, prompt_tokens)
    for number in rows:
        encoded = [tokenizer(text)["input_ids"][:prompt_tokens] for text in source.take(number)]
        length = min(map(len, encoded))
        ids = torch.tensor([tokens[:length] for tokens in encoded], device=device)
        decoder = Decoder(model, number, max_length=length + new_tokens, eos_token_id=[])
        for _ in decoder.stream(ids, max_new_tokens=4):
            pass
        times = [time.monotonic()]
        for _ in decoder.stream(ids, max_new_tokens=new_tokens):
            times.append(time.monotonic())
        yield {
            "rows": number,
            "prompt_tokens": length,
            "tokens_per_second": number * new_tokens / (times[-1] - times[0]),
            "tokens_per_second_without_prompts": number * (new_tokens - 1) / (times[-1] - times[1]),
            "first_token": times[1] - times[0],
        }


def add_rows(path: Path, label: str, rows: Iterable[dict[str, Any]], device: str, commit: str) -> None:
    """Add rows to a result file as they come, with where they were measured."""
    from benchmarks.provenance import describe_run

    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": []}
    run = asdict(describe_run(device=device, commit=commit, command=sys.argv[1:]))
    content["runs"].append({"label": label, "run": run, "rows": []})
    path.parent.mkdir(parents=True, exist_ok=True)
    for row in rows:
        print(row, flush=True)
        content["runs"][-1]["rows"].append(row)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model", help="save a model with random weights and a tokenizer")
    model.add_argument("folder", type=Path)
    model.add_argument("--kind", choices=("gated_deltanet", "qwen3_next"), default="gated_deltanet")
    model.add_argument("--size", default="340m", help="as in deltazoo bench model")
    waiting = commands.add_parser("wait", help="return once all servers answer")
    waiting.add_argument("urls", nargs="+")
    waiting.add_argument("--seconds", type=float, default=300.0, help="after which to give up")
    asking = commands.add_parser("load", help="ask a server")
    asking.add_argument("--url", required=True, help="of the server")
    asking.add_argument("--model", default="served", help="the name of the model in requests")
    asking.add_argument("--tokenizer", type=Path, required=True, help="folder of the model, to make prompts with")
    asking.add_argument("--label", required=True, help="of the rows in the result file")
    asking.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64, 256])
    asking.add_argument("--rounds", type=int, default=2, help="requests of each client")
    asking.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    timing = commands.add_parser("generate", help="time deltazoo.generate")
    timing.add_argument("path", type=Path, help="folder of the model")
    timing.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    for command in (asking, timing):
        command.add_argument("--prompt-tokens", type=int, default=1024)
        command.add_argument("--new-tokens", type=int, default=128)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--commit", help="read from git unless given")
    for command in (model, asking, timing):
        command.add_argument("--device", default="cuda")
    args = parser.parse_args()

    if args.command == "wait":
        return wait_for(args.urls, args.seconds)
    if args.command == "model":
        return save_model(args.folder, args.device, args.kind, args.size)
    if args.command == "generate":
        found = generate_rows(args.path, args.device, args.rows, args.prompt_tokens, args.new_tokens)
        return add_rows(args.out, "deltazoo.generate", found, args.device, args.commit)
    body = {
        "model": args.model,
        "max_tokens": args.new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    source = Prompts(args.tokenizer, args.prompt_tokens)
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        share = (args.processes, source, body, pool)
        print("warm-up", load(args.url, args.processes, 1, *share), flush=True)
        rows = (load(args.url, clients, args.rounds, *share) for clients in args.clients)
        add_rows(args.out, args.label, rows, args.device, args.commit)


if __name__ == "__main__":
    main()
