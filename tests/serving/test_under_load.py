"""A server with a model under load on a CPU: many clients, hang-ups, bad requests, floods, kills, restarts.

The engine has one width here, so that every answer must equal the one that the request gets alone, byte for byte.
`DELTAZOO_LONG_LOAD=1` sends ten times as many requests, for ten times as long, and says how many (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
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
    byte_tokenizer(TEMPLATE).save_pretrained(folder)
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


async def ask_all(url: str, requests: list[Asked], at_once: int) -> None:
    places = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:

        async def one(asked: Asked) -> None:
            async with places:
                await ask(client, asked)
                if asked.status == 429:
                    await asyncio.sleep(0.1)  # a moment of what Retry-After asks for

        await asyncio.gather(*map(one, requests))


ANYTHING = [
    *(None, True, 0, 1, -1, 1.5, 1e-300, 1e300, 2**40, 2**64, "", "x", "\u00e9\0\u20ac", "\ud800", [], ["a"], [[]]),
    *([1], [[1, 2], [3]], {}, {"a": 1}, [{}], [{"role": "user", "content": 1}], [{"role": "x", "content": ""}]),
]
FIELDS = {
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "echo"),
    *("temperature", "top_p", "top_k", "seed", "stop", "logprobs", "top_logprobs", "best_of", "suffix", "ignore_eos"),
    *("logit_bias", "tools", "response_format", "anything"),
}


def test_nan_is_an_error_and_never_a_number() -> None:
    """500 or an error event, with log-probabilities or without, while others are answered."""
    model, tokenizer = small_model(), byte_tokenizer(TEMPLATE)
    model.get_input_embeddings().weight.data[tokenizer("N")["input_ids"][-1]] = float("nan")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    with (
        Engine(model, tokenizer, widths=(2,), context_limit=64) as engine,
        background_server(create_app(engine, model="tiny")) as url,
        httpx.Client(base_url=f"{url}/v1/", trust_env=False) as client,
    ):
        for endpoint in ("completions", "chat/completions"):
            is_chat = endpoint == "chat/completions"
            bad, good = ({"messages": [{"role": "user", "content": x}]} if is_chat else {"prompt": x} for x in "Na")
            for stream, asked in itertools.product((False, True), ({}, {"logprobs": True if is_chat else 2})):
                body = {"max_tokens": 2, "temperature": 0, **asked}
                answer = client.post(endpoint, json={**body, **bad, "stream": stream})
                assert answer.status_code == (200 if stream else 500)
                events = answer.text.replace("data: [DONE]", "").split("data: ") if stream else [answer.text]
                said = [json.loads(event, parse_constant=refuse) for event in events if event.strip()]
                assert "NaN or infinite logits" in said[-1]["error"]["message"]
                assert client.post(endpoint, json={**body, **good}).status_code == 200


HOSTILE = [
    *(b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": ' * 50_000),
    b'{"a":' + b"9" * 9000 + b"}",
    *(b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "top_p": Infinity}', b'{"prompt": "x", "prompt": 1}'),
    *(b'{"prompt": "\\ud800"}', b'{"\\ud800": 1}', b'{"prompt": [[1], []]}'),
    b'{"prompt": [' + b"1," * 900_000 + b"1]}",
    b'{"prompt": "' + b"a" * 3_000_000 + b'"}',
    b'{"prompt": "' + b" " * 5_000_000 + b'"}',
    b'{"messages": [' + b"{}," * 900_000 + b"{}]}",
    b'{"messages": [{"role": "user", "content": [' + b"1," * 900_000 + b"1]}]}",
    b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "{{ 1 / 0 }}"}}',
    b"{" + b",".join(b'"%d": 1' % number for number in range(200_000)) + b"}",
]  # fmt: skip


def test_whatever_is_sent_is_answered_or_refused_with_a_sentence_and_holds_nobody_up(engine: Engine) -> None:
    """Hostile bodies, and random ones of known fields."""
    source, statuses, slowest = random.Random(0), set(), 0.0
    with (
        background_server(create_app(engine, model="tiny")) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as client,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        every = itertools.product(
            HOSTILE, ("completions", "chat/completions"), ({"Content-Type": "application/json"}, {})
        )
        for body, path, headers in every:
            asking = pool.submit(client.post, f"/v1/{path}", content=body, headers=headers)
            while not asking.done():
                began = time.monotonic()
                assert other.get("/health").status_code == 200
                slowest = max(slowest, time.monotonic() - began)
            answer = asking.result()
            assert answer.status_code in (400, 413), (body[:50], answer.text[:200])
            assert len(answer.json()["error"]["message"]) < 300
        assert slowest < 1.5
        for _ in range(250):
            chat = source.random() < 0.3
            fields: dict[str, Any] = {"max_tokens": 2} | ({"messages": []} if chat else {"prompt": "ab"})
            fields |= {field: source.choice(ANYTHING) for field in source.sample(sorted(FIELDS), 2)}
            answer = client.post(
                "/v1/chat/completions" if chat else "/v1/completions",
                content=json.dumps(fields),
                headers={"Content-Type": "application/json"},
            )
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), (fields, answer.text)
            assert ("error" in answer.text) == (answer.status_code != 200), (fields, answer.text)
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


def number_of(url: str, *names: str) -> float:
    """The sum of some numbers of a server's metrics."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(
        float(line.split()[1]) for line in lines if line.startswith(tuple(f"deltazoo_{name}{{" for name in names))
    )


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with deltazoo_serve(folder, "--widths", str(WIDTH), "--context-limit", "40000") as (_, url):
        yield url


def kinds_of_requests() -> list[tuple[bool, dict[str, Any]]]:
    """Whether it is a chat, and its body."""
    found: list[tuple[bool, dict[str, Any]]] = []
    for index, body in enumerate(bodies(40, 3000)):
        own = {"top_k": body.pop("top_k")} if "top_k" in body else {}
        body |= {"model": "tiny", "extra_body": own}
        if index % 4 == 1:
            body |= {"n": 3, "seed": index}
        if index % 5 == 2:
            body |= {"logprobs": 3}
        if index % 7 == 3:
            body |= {"prompt": [body["prompt"], "another"], "echo": "logprobs" not in body}
        elif index % 3 == 0:
            chat = {
                "messages": [{"role": "user", "content": "q" + body.pop("prompt")}],
                "logprobs": body.pop("logprobs", 0) > 0,
            }
            found.append((True, {**body, **chat}))
            continue
        found.append((False, body))
    return found


async def ask_by_openai(client: Any, is_chat: bool, body: dict[str, Any]) -> str:
    """All that an answer says, streamed or not in one form; seeds that the server drew are left out."""
    create = (client.chat if is_chat else client).completions.create
    answer = await create(**body)
    choices: dict[int, list[Any]] = {}
    for part in [part async for part in answer] if body["stream"] else [answer]:
        for choice in part.choices:
            text, reason, entries = choices.setdefault(choice.index, ["", None, []])
            if is_chat:
                text += (choice.delta if body["stream"] else choice.message).content or ""
                entries += [
                    (entry.token, entry.logprob) for entry in (choice.logprobs.content if choice.logprobs else [])
                ]
            else:
                text += choice.text
                if choice.logprobs:
                    found = choice.logprobs
                    entries += zip(found.tokens, found.text_offset, found.token_logprobs, strict=True)
            choices[choice.index] = [text, choice.finish_reason or reason, entries]
    return json.dumps(choices, sort_keys=True)


@pytest.mark.slow
def test_64_clients_of_openai_get_what_each_gets_alone(url: str) -> None:
    """Requests of all kinds for some seconds, bad ones and hang-ups among them: none lost, none mixed up."""
    kinds, got, counts = kinds_of_requests(), [set() for _ in range(40)], {"good": 0, "bad": 0, "hung up": 0}

    async def client_of(number: int, client: Any, end: float) -> None:
        source = random.Random(number)
        while time.monotonic() < end:
            if source.random() < 0.05:
                with pytest.raises(openai.BadRequestError):
                    bad = source.choice([{"prompt": [258]}, {"prompt": "x", "temperature": 9}, {"prompt": "x" * 2**21}])
                    await client.completions.create(model="tiny", stream=source.random() < 0.5, **bad)
                counts["bad"] += 1
            elif source.random() < 0.1:
                stream = await client.completions.create(
                    model="tiny", prompt="x", max_tokens=9000, stream=True, extra_body={"ignore_eos": True}
                )
                async for _ in stream:
                    break
                await stream.close()
                counts["hung up"] += 1
            else:
                index = source.randrange(len(kinds))
                got[index].add(await ask_by_openai(client, *kinds[index]))
                counts["good"] += 1

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            end = time.monotonic() + 6 * LONGER
            await asyncio.gather(*(client_of(number, client, end) for number in range(64)))
            print(f"64 clients, {6 * LONGER} s: {counts}")
            for (is_chat, body), answers in zip(kinds, got, strict=True):
                alone = await ask_by_openai(client, is_chat, body)
                seeded = body.get("temperature") == 0 or "seed" in body
                assert not seeded or answers <= {alone}, body

    asyncio.run(run())
    assert number_of(url, "running", "prefilling", "waiting") == 0


@pytest.mark.slow
def test_300_hang_ups_free_their_rows_within_a_second(url: str) -> None:
    async def run() -> float:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:

            async def begin(stream: bool) -> Any:
                request = client.build_request("POST", "/v1/completions", json={**ENDLESS, "stream": stream})
                sending = asyncio.create_task(client.send(request, stream=True))
                if stream:
                    return await sending
                await asyncio.sleep(0.3)  # no header comes before the answer
                return sending

            slowest = 0.0
            for _ in range(3):  # 16 of 100 run, the others wait
                answers = await asyncio.gather(*(begin(bool(number % 4)) for number in range(100)))
                while number_of(url, "running") < WIDTH:
                    await asyncio.sleep(0.02)
                began = time.monotonic()
                for answer in answers:
                    if isinstance(answer, asyncio.Task):
                        answer.cancel()
                    else:
                        await answer.aclose()
                while number_of(url, "running", "prefilling", "waiting"):
                    assert time.monotonic() < began + 30
                    await asyncio.sleep(0.01)
                slowest = max(slowest, time.monotonic() - began)
            return slowest

    slowest = asyncio.run(run())
    print(f"300 hang-ups: rows free after {slowest:.2f} s at most")
    assert slowest < 1


def memory_of(pid: int) -> int:
    """Bytes of a process and of those that it has started."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


@pytest.mark.slow
def test_killed_restarted_and_told_to_stop_mid_stream(folder: Path, engine: Engine) -> None:
    """Every finished answer is the one that the request gets alone; SIGTERM and SIGINT let all of them finish."""
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

    for number in (signal.SIGTERM, signal.SIGINT):
        with deltazoo_serve(folder, "--widths", str(WIDTH), port=int(url.rpartition(":")[2])) as (server, again):
            assert again == url
            stopped = ask_and_send(url, server, number)
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
