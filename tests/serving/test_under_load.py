"""A server with a model under load on a CPU: many clients, hang-ups, bad requests, floods, kills, restarts.

The engine has one width here, so that every answer must equal the one that the request gets alone, byte for byte.
`DELTAZOO_LONG_LOAD=1` sends ten times as many requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_engine import byte_tokenizer
from tiny_models import tiny_model

REASON = "needs the extras serve and test: pip install 'deltazoo[test]'"
for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason=REASON)
httpx = pytest.importorskip("httpx", reason=REASON)
openai = pytest.importorskip("openai", reason=REASON)

from deltazoo.serving import Engine, Request, TextStream, background_server, create_app  # noqa: E402

WIDTH = 16
LIMIT = 4100
LONGER = 10 if os.environ.get("DELTAZOO_LONG_LOAD") else 1


def small_model() -> Any:
    """Always with the same weights."""
    return tiny_model("gated_deltanet", vocab_size=258, eos_token_id=1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    small_model().save_pretrained(folder)
    byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(small_model(), byte_tokenizer(), widths=(WIDTH,), context_limit=LIMIT, prefix_memory=2**22) as engine:
        yield engine


@dataclass
class Asked:
    """What a client sends, what it does, and what came back."""

    body: dict[str, Any]
    hangs_up: bool = False
    by_openai: bool = False
    status: int = 0
    text: str = ""
    finish_reason: str | None = None


def alone(engine: Engine, body: dict[str, Any]) -> tuple[str, str | None]:
    """Text and finish reason of a request when nothing else runs, of its first 150 tokens if it asks for more."""
    sampling = {name: body[name] for name in ("temperature", "top_p", "top_k", "seed") if name in body}
    prompt = tuple(engine.tokenizer(body["prompt"])["input_ids"])
    limits = {"max_tokens": min(body["max_tokens"], 150), "ignore_eos": body.get("ignore_eos", False)}
    stream = engine.submit(Request(prompt=prompt, **limits, **sampling))
    pieces = list(TextStream(stream, engine.tokenizer, body.get("stop", ())))
    return "".join(piece.text for piece in pieces), pieces[-1].finish_reason


def bodies(number: int, longest: int) -> Iterator[dict[str, Any]]:
    """Requests of all kinds, prompts from 1 to `longest` tokens."""
    source = random.Random(number)
    for index in range(number):
        length = round(longest ** (index / max(1, number - 1)))
        body: dict[str, Any] = {
            "prompt": "".join(source.choices("abcdefgh ", k=length - 1)),  # and the token that begins a text
            "max_tokens": source.randint(1, 24),
            "stream": bool(index % 2),
        }
        kind = index % 3
        if kind == 0:
            body |= {"temperature": 0}
        elif kind == 1:
            body |= {"temperature": 0.9, "top_p": 0.9, "seed": index}
        else:
            body |= {"temperature": 1.1, "top_k": 20, "seed": index, "stop": ["e", "1"]}
        yield body


async def ask(client: Any, asked: Asked) -> None:
    """Send the request; a client that hangs up does it after the first text."""
    if not asked.body.get("stream"):
        answer = await client.post("/v1/completions", json=asked.body)
        asked.status = answer.status_code
        if answer.status_code == 200:
            choice = answer.json()["choices"][0]
            asked.text, asked.finish_reason = choice["text"], choice["finish_reason"]
        return
    async with client.stream("POST", "/v1/completions", json=asked.body) as answer:
        asked.status = answer.status_code
        async for line in answer.aiter_lines():
            if answer.status_code != 200 or not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            asked.text += choice["text"]
            asked.finish_reason = choice["finish_reason"]
            if asked.hangs_up:
                return


async def ask_by_openai(client: Any, asked: Asked) -> None:
    """The same with OpenAI's client."""
    own = {name: asked.body[name] for name in ("top_k", "ignore_eos") if name in asked.body}
    body = {name: value for name, value in asked.body.items() if name not in own}
    answer = await client.completions.create(model="tiny", **body, extra_body=own)
    asked.status = 200
    if not body["stream"]:
        asked.text, asked.finish_reason = answer.choices[0].text, answer.choices[0].finish_reason
        return
    async for chunk in answer:
        asked.text += chunk.choices[0].text
        asked.finish_reason = chunk.choices[0].finish_reason
        if asked.hangs_up:
            return await answer.close()


async def ask_all(url: str, requests: list[Asked], at_once: int) -> None:
    places = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as other,
    ):

        async def one(asked: Asked) -> None:
            async with places:
                await (ask_by_openai(other, asked) if asked.by_openai else ask(client, asked))
                if asked.status == 429:
                    await asyncio.sleep(0.1)  # a moment of what Retry-After asks for

        await asyncio.gather(*map(one, requests))


def wait_until_idle(engine: Engine) -> Any:
    end = time.monotonic() + 30
    while True:
        status = engine.status()
        if not any(status.counters[name] for name in ("running", "prefilling", "waiting")):
            return status.finished
        assert time.monotonic() < end, status
        time.sleep(0.02)


@pytest.mark.slow
def test_many_clients_get_what_each_gets_alone(engine: Engine) -> None:
    """64 at once, of which 10% hang up mid-stream, and bad requests among them: none lost, none mixed up."""
    good = [Asked(body) for body in bodies(56, LIMIT - 100)]
    for asked in good[1:50:9]:
        asked.body |= {"stream": True, "max_tokens": 1000, "stop": [], "ignore_eos": True}
        asked.hangs_up = True
    for asked in good[::3]:
        asked.by_openai = True
    bad = [
        Asked({"prompt": "x" * LIMIT, "max_tokens": 5}),
        Asked({"prompt": "x", "max_tokens": LIMIT}),
        Asked({"prompt": "x", "max_tokens": 5, "temperature": 9, "stream": True}),
        Asked({"prompt": [258], "max_tokens": 5}),
        Asked({"prompt": [-1], "max_tokens": 5, "stream": True}),
        Asked({"prompt": {}, "max_tokens": 5}),
        Asked({"max_tokens": 5}),
        Asked({"prompt": "x", "tools": [1]}),
    ]
    everything = [*good, *bad]
    random.Random(0).shuffle(everything)
    before = wait_until_idle(engine)
    with background_server(create_app(engine, model="tiny")) as url:
        asyncio.run(ask_all(url, everything, at_once=64))
        after = wait_until_idle(engine)

    assert [asked.status for asked in bad] == [400] * len(bad)
    finished = {reason: after[reason] - before[reason] for reason in after}
    hung_up = [asked for asked in good if asked.hangs_up]
    stopped = sum(bool(asked.body.get("stop")) and asked.finish_reason == "stop" for asked in good)
    assert 6 <= len(hung_up) <= finished["cancelled"] <= len(hung_up) + stopped
    assert sum(finished.values()) == len(good)
    for asked in good:
        text, reason = alone(engine, asked.body)
        assert asked.status == 200
        if asked.hangs_up:
            assert text.startswith(asked.text)
        else:
            assert (asked.text, asked.finish_reason) == (text, reason), asked.body


ANYTHING = [
    *(None, True, 0, 1, -1, 1.5, 1e-300, 1e300, 2**40, 2**64, "", "x", "\u00e9\0\u20ac", "\ud800", [], ["a"], [[]]),
    *([1], [[1, 2], [3]], {}, {"a": 1}, [{}], [{"role": "user", "content": 1}], [{"role": "x", "content": ""}]),
]
FIELDS = {
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "echo"),
    *("temperature", "top_p", "top_k", "seed", "stop", "logprobs", "top_logprobs", "best_of", "suffix", "ignore_eos"),
    *("logit_bias", "tools", "response_format", "anything"),
}


def test_whatever_is_sent_is_answered_or_refused_with_a_sentence(engine: Engine) -> None:
    source, statuses = random.Random(0), set()
    with (
        background_server(create_app(engine, model="tiny")) as url,
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        for _ in range(250):
            chat = source.random() < 0.3
            body: dict[str, Any] = {"max_tokens": 2} | ({"messages": []} if chat else {"prompt": "ab"})
            body |= {field: source.choice(ANYTHING) for field in source.sample(sorted(FIELDS), 2)}
            answer = client.post(
                "/v1/chat/completions" if chat else "/v1/completions",
                content=json.dumps(body),
                headers={"Content-Type": "application/json"},
            )
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            assert ("error" in answer.text) == (answer.status_code != 200), (body, answer.text)
    assert {200, 400} <= statuses and engine.status().running


@contextmanager
def deltazoo_serve(folder: Path, *options: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`deltazoo serve` in a process of its own, and its URL."""
    command = [sys.executable, "-m", "deltazoo", "serve", str(folder), "--device", "cpu", "--port", str(port), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        line = server.stdout.readline()
        assert line.startswith("tiny at http://127.0.0.1:"), line + server.stderr.read()
        assert server.stdout.readline().startswith("curl http://127.0.0.1:")
        yield server, line.split()[2].removesuffix("/v1,")
    finally:
        server.kill()
        server.communicate()


def memory_of(pid: int) -> int:
    """Bytes of a process and of those that it has started."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


@pytest.mark.slow
def test_killed_restarted_and_told_to_stop_mid_stream(folder: Path, engine: Engine) -> None:
    """Every finished answer is the one that the request gets alone; SIGTERM lets all of them finish."""
    wanted = [{**body, "max_tokens": 150, "stream": True} for body in bodies(9, 600)]
    expected = [alone(engine, body) for body in wanted]

    def ask_and_send(url: str, server: subprocess.Popen[str], number: int) -> list[Asked]:
        """Ask for all at once, and send the signal when some text of each has come."""
        everything = [Asked(body) for body in wanted]

        async def run() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
                answers = asyncio.gather(*(ask(client, asked) for asked in everything), return_exceptions=True)
                while not all(asked.text for asked in everything) and not answers.done():
                    await asyncio.sleep(0.01)
                server.send_signal(number)
                await answers

        asyncio.run(run())
        return everything

    with deltazoo_serve(folder, "--widths", str(WIDTH)) as (server, url):
        killed = ask_and_send(url, server, signal.SIGKILL)
    assert any(asked.finish_reason is None for asked in killed)
    for asked, (text, reason) in zip(killed, expected, strict=True):
        if asked.finish_reason is None:
            assert text.startswith(asked.text)
        else:
            assert (asked.text, asked.finish_reason) == (text, reason)

    with deltazoo_serve(folder, "--widths", str(WIDTH), port=int(url.rpartition(":")[2])) as (server, again):
        assert again == url
        stopped = ask_and_send(url, server, signal.SIGTERM)
        assert [(asked.text, asked.finish_reason) for asked in stopped] == expected
        assert server.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)


ENDLESS = {"prompt": "x", "max_tokens": 30_000, "stream": True, "seed": 0, "ignore_eos": True}
QUEUE = 24


async def burst(url: str, bodies: list[dict[str, Any]]) -> list[Asked]:
    """Send the requests at once while endless ones hold every row, and let go of these when all others are refused."""
    holders = [Asked(ENDLESS) for _ in range(WIDTH)]
    asked = [Asked(body) for body in bodies]
    limits = httpx.Limits(max_connections=None)
    async with (
        asyncio.timeout(120),
        httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client,
    ):
        holding = [asyncio.create_task(ask(client, one)) for one in holders]
        while not all(one.text for one in holders):
            await asyncio.sleep(0.01)
        asking = [asyncio.create_task(ask(client, one)) for one in asked]
        while sum(one.status == 429 for one in asked) < len(asked) - QUEUE:
            await asyncio.sleep(0.01)
        for task in holding:
            task.cancel()
        await asyncio.gather(*asking)
        await asyncio.gather(*holding, return_exceptions=True)
    return asked


@pytest.mark.slow
def test_a_flood_is_refused_in_part_and_memory_stays(folder: Path, engine: Engine) -> None:
    """What the queue has no place for is refused, no more; then 700 requests; then a stop that cuts off the rest."""
    wanted = [{**body, "max_tokens": 1 + index % 4} for index, body in enumerate(bodies(100, 60))]
    expected = [alone(engine, body) for body in wanted]

    def check(everything: list[Asked]) -> list[int]:
        for index, asked in enumerate(everything):
            if asked.status == 200:
                assert (asked.text, asked.finish_reason) == expected[index % len(wanted)]
        return [asked.status for asked in everything]

    def flood(url: str, rounds: int) -> list[int]:
        everything = [Asked(body) for _ in range(rounds) for body in wanted]
        asyncio.run(ask_all(url, everything, at_once=64))
        return check(everything)

    options = ("--widths", str(WIDTH), "--max-queue", str(QUEUE), "--prefix-memory", "0.002", "--stop-timeout", "0.5")
    with deltazoo_serve(folder, *options) as (server, url):
        burst_statuses = check(asyncio.run(burst(url, wanted[: QUEUE + 40])))
        statuses = flood(url, 2)
        early = memory_of(server.pid)
        statuses += flood(url, 5 * LONGER)
        late = memory_of(server.pid)
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            rest = "".join(lines)
        assert "the server stopped before the request was finished" in rest and rest.endswith("data: [DONE]")
        assert server.wait(20) == 0
    assert sorted(burst_statuses) == [200] * QUEUE + [429] * 40
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 0.7 * len(statuses), statuses.count(200)
    rejected = next(line for line in metrics.splitlines() if line.startswith("deltazoo_rejected_total{"))
    assert float(rejected.split()[1]) == 40 + statuses.count(429)
    assert late - early < 16 * 2**20, f"{(late - early) / 2**20:.1f} MiB more after {len(statuses)} requests"
