"""The HTTP API before an engine without a model: shapes of responses, bad requests, hang-ups, keys, metrics."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
from fake_engine import CONTEXT, FakeEngine, byte_tokenizer, expected_text

REASON = "needs the extras serve and test: pip install 'deltazoo[test]'"
for package in ("uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason=REASON)
fastapi = pytest.importorskip("fastapi", reason=REASON)
httpx = pytest.importorskip("httpx", reason=REASON)
openai = pytest.importorskip("openai", reason=REASON)

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from deltazoo.serving import EngineError, Piece, RequestError, TokenLogprob, background_server, create_app  # noqa: E402
from deltazoo.serving import http as http_module  # noqa: E402
from deltazoo.serving import text as text_module  # noqa: E402
from deltazoo.serving.api import Answer, ChatBody, CompletionBody  # noqa: E402
from deltazoo.serving.http import _Connection, bind, url_of  # noqa: E402

SLEEP = "import time; time.sleep(600)"
TEMPLATE = (
    "{% if loud %}loud {% endif %}{% for message in messages %}"
    "{% if message.content == 'forbidden' %}{{ raise_exception('not that') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


SAY = [{"role": "user", "content": "x"}]


def says(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


ASK: dict[str, Any] = {"prompt": "x"}
CHAT: dict[str, Any] = {"messages": SAY}


@contextmanager
def served(engine: FakeEngine, **options: Any) -> Iterator[str]:
    with engine, background_server(create_app(engine, model="tiny", **options)) as url:
        yield url


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(byte_tokenizer(TEMPLATE))


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with served(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def test_a_completion(client: Any, engine: FakeEngine) -> None:
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=8, seed=5, top_p=0.9, temperature=0.5)
    asked = engine.requests[-1]
    assert asked.prompt == tuple(byte_tokenizer()("Hello")["input_ids"])
    assert (asked.max_tokens, asked.seed, asked.top_p, asked.temperature, asked.top_k) == (8, 5, 0.9, 0.5, None)
    assert answer.choices[0].text == expected_text(asked, 5)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 8, 14)
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.model, answer.object) == ("tiny", "text_completion")


def test_a_completion_in_pieces_is_the_same_text(client: Any) -> None:
    options = dict(model="tiny", prompt="Hello", max_tokens=40, seed=6)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(chunk.choices[0].text for chunk in chunks[:-1]) == client.completions.create(**options).choices[0].text
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 40
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_stream_is_server_sent_events(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: {") and "usage" not in json.loads(line[6:]) for line in lines[:-1])


def test_defaults_are_those_of_the_api(client: Any, engine: FakeEngine) -> None:
    client.completions.create(model="tiny", prompt="x")
    asked = engine.requests[-1]
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.logprobs) == (16, 1.0, 1.0, None)
    client.chat.completions.create(model="tiny", messages=SAY, stop="a")
    assert engine.requests[-1].max_tokens is None
    # Filters do nothing without draws.
    client.completions.create(model="tiny", prompt="s", max_tokens=1, temperature=0, top_p=0.5, extra_body={"top_k": 3})
    asked = engine.requests[-1]
    assert (asked.temperature, asked.top_p, asked.top_k) == (0, 1.0, None)


def test_several_prompts_and_choices(client: Any, engine: FakeEngine) -> None:
    seen, options = len(engine.requests), dict(model="tiny", prompt=["a", "bc"], n=2, max_tokens=5, seed=1, echo=True)
    answer = client.completions.create(**options)
    asked = engine.requests[seen:]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    choices = zip(["a", "a", "bc", "bc"], asked, [1, 2, 1, 2], strict=True)
    expected = [prompt + expected_text(request, seed) for prompt, request, seed in choices]
    assert [choice.text for choice in answer.choices] == expected
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 20)

    texts = ["", "", "", ""]
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_prompts_of_token_ids(client: Any, engine: FakeEngine) -> None:
    ids = byte_tokenizer()("word", add_special_tokens=False)["input_ids"]
    answer = client.completions.create(model="tiny", prompt=ids, max_tokens=2, echo=True)
    assert engine.requests[-1].prompt == tuple(ids)
    assert answer.choices[0].text.startswith("word")
    client.completions.create(model="tiny", prompt=[ids, ids[:1]], max_tokens=2)
    assert [request.prompt for request in engine.requests[-2:]] == [tuple(ids), tuple(ids[:1])]


def test_stop_strings_end_the_text_and_the_extensions_reach_the_engine(client: Any, engine: FakeEngine) -> None:
    options = dict(model="tiny", prompt="s", max_tokens=60, seed=0)
    text = client.completions.create(**options).choices[0].text
    own = {"top_k": 7, "ignore_eos": True}
    answer = client.completions.create(**options, stop=["!", text[30:33]], extra_body=own)
    asked = engine.requests[-1]
    assert (asked.top_k, asked.ignore_eos) == (7, True)
    assert answer.choices[0].text == text[: text.index(text[30:33])]
    assert answer.choices[0].finish_reason == "stop"


def test_a_seed_that_was_drawn_is_reported(url: str) -> None:
    body = {"prompt": "x", "max_tokens": 9}
    first = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]
    again = httpx.post(f"{url}/v1/completions", json={**body, "seed": first["seed"]}).json()["choices"][0]
    assert again["text"] == first["text"]
    streamed = httpx.post(f"{url}/v1/completions", json={**body, "seed": 3, "stream": True}).text
    assert json.loads(streamed.split("\n\n")[-3][6:])["choices"][0]["seed"] == 3


def test_log_probabilities(client: Any) -> None:
    choice = client.completions.create(model="tiny", prompt="x", max_tokens=4, seed=0, logprobs=2).choices[0]
    assert choice.logprobs.tokens == list(choice.text)
    assert choice.logprobs.token_logprobs == [-0.5] * 4
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert [max(top, key=top.__getitem__) for top in choice.logprobs.top_logprobs] == list(choice.text)
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * 4

    options = dict(model="tiny", messages=SAY, seed=0, logprobs=True, top_logprobs=3, max_completion_tokens=4)
    choice = client.chat.completions.create(**options).choices[0]
    assert [entry.token for entry in choice.logprobs.content] == list(choice.message.content)
    assert [entry.bytes for entry in choice.logprobs.content] == [[ord(c)] for c in choice.message.content]
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [entry.token for entry in streamed] == list(choice.message.content)


def logprobs_of(logprob: float, top: Any) -> Any:
    entry = TokenLogprob(token_id=99, logprob=logprob, top=top, content=b"b", offset=0)
    answer = Answer(CompletionBody(prompt="x"), "tiny", byte_tokenizer(), [None], None)
    event = answer.event(0, Piece(text="b", token_ids=(99,), logprobs=(entry,)))
    return json.loads(event[6:])["choices"][0]["logprobs"]


@pytest.mark.parametrize("body", [CompletionBody(prompt="x", n=2), ChatBody(messages=SAY, n=2)])
def test_events_are_of_openais_types_and_one_line_each(body: Any) -> None:
    answer = Answer(body, 'a "model"\n', byte_tokenizer(), [None, None], None)
    first = "lines\u2028of\x85text"  # they end no event, though str.splitlines ends lines there
    for text in (first, "a", '"quoted"\n\r\t\\\0\x7f\u2028', "日本 👩‍🚀"):
        for index in (0, 1):
            event = answer.event(index, Piece(text=text))
            assert event.startswith(b"data: {") and event.endswith(b"}\n\n") and event.count(b"\n") == 2
            (choice,) = json.loads(event[6:])["choices"]
            assert choice["index"] == index
            assert text == (choice["delta"]["content"] if isinstance(body, ChatBody) else choice["text"])
            if isinstance(body, ChatBody):  # the type of a text's choice knows no choice that goes on
                openai.types.chat.ChatCompletionChunk.model_validate_json(event[6:], strict=True)


def test_the_chosen_token_is_among_the_likeliest_and_numbers_are_finite() -> None:
    likeliest = byte_tokenizer()("a", add_special_tokens=False)["input_ids"][0]
    found = logprobs_of(float("-inf"), ((likeliest, -0.1),))
    assert found["top_logprobs"] == [{"a": -0.1, "b": -9999.0}] and found["token_logprobs"] == [-9999.0]
    # Of equal texts the likeliest is told: numbers beyond the vocabulary have the same one, none.
    found = logprobs_of(-5.0, ((300, -1.0), (301, -2.0), (302, -3.0)))
    assert found["top_logprobs"] == [{"": -1.0, "b": -5.0}]
    for logprob, other in ((float("nan"), -1.0), (-1.0, float("nan"))):
        with pytest.raises(EngineError, match="NaN"):
            logprobs_of(logprob, ((98, other),))


def test_a_chat(client: Any, engine: FakeEngine) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, seed=4, max_completion_tokens=6)
    asked = engine.requests[-1]
    prompt = byte_tokenizer().decode(asked.prompt, skip_special_tokens=True)
    assert prompt == "system: be brief\nuser: Hello\nassistant:"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected_text(asked, 4)
    assert answer.usage.completion_tokens == 6

    # The answer, as the client holds it, goes back into the conversation.
    messages = [*messages, answer.choices[0].message, {"role": "user", "content": "more"}]
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, seed=4, max_tokens=6, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected_text(engine.requests[-1], 4)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_variables_reach_the_chat_template(client: Any, engine: FakeEngine) -> None:
    for loud in (True, False):
        options = {"chat_template_kwargs": {"loud": loud}}
        client.chat.completions.create(model="tiny", messages=SAY, max_tokens=1, extra_body=options)
        prompt = byte_tokenizer().decode(engine.requests[-1].prompt, skip_special_tokens=True)
        assert prompt.startswith("loud user" if loud else "user")


def test_a_chat_needs_a_template() -> None:
    with served(FakeEngine(byte_tokenizer())) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT)
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]


BAD: list[tuple[Any, str | None, str]] = [
    ({}, "prompt", "prompt is missing"),
    ([], None, "must be a JSON object"),
    ({"prompt": []}, "prompt", "must be a text"),
    ({"prompt": [[1], "x"]}, "prompt", "must be a text"),
    ({"prompt": [[]]}, "prompt", "none of them empty"),
    ({"prompt": "x" * CONTEXT}, None, f"the context limit is {CONTEXT}"),
    ({"prompt": ["x"] * 65, "n": 2}, "prompt", "65 prompts times n=2"),
    ({"prompt": "x \ud800"}, "prompt", "surrogates not allowed"),
    ({"prompt": [2**70], "echo": True}, "prompt", "does not know"),
    ({**ASK, "top_k": 2**70}, "top_k", "less than 2147483648"),
    ({**ASK, "max_tokens": 0}, "max_tokens", "greater than or equal to 1, got 0"),
    ({**ASK, "max_tokens": 1.5}, "max_tokens", "got 1.5"),
    ({**ASK, "temperature": -1}, "temperature", "got -1"),
    ({**ASK, "temperature": "1"}, "temperature", "valid number, got '1'"),
    ({**ASK, "top_p": 0}, "top_p", "greater than 0"),
    ({**ASK, "n": 0}, "n", "got 0"),
    ({**ASK, "best_of": 3}, "best_of", "must equal n=1"),
    ({**ASK, "stop": [""]}, "stop", "none of them empty"),
    ({**ASK, "stop": list("abcde")}, "stop", "up to four"),
    ({**ASK, "logprobs": 21}, "logprobs", "got 21"),
    ({**ASK, "logprobs": 1, "echo": True}, "echo", "logprobs of the prompt"),
    ({**ASK, "suffix": "y"}, "suffix", "not computed"),
    ({**ASK, "logit_bias": {"5": 1}}, "logit_bias", "not computed"),
    ({**ASK, "max_new_tokens": 5}, "max_new_tokens", "there is no such field"),
    ({**ASK, "stream_options": {}}, "stream_options", "stream=true"),
    ({**ASK, "stream": True, "stream_options": {"a": 1}}, "stream_options.a", "no such"),
    ({**ASK, "model": "gpt"}, "model", "only 'tiny'"),
    ({str(i): 1 for i in range(50_000)}, "0", "no such field"),
    ({"prompt": "x" * 40_000}, "prompt", f"more than {CONTEXT} tokens, the context limit"),
    ({"messages": says("\udfff")}, "messages", "surrogates"),
    ({"messages": [{**SAY[0], "name": "\ud800"}]}, "messages", "surrogates"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "makes no tool calls"),
    ({"messages": [*SAY, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[1]", "makes no tool calls"),
    ({"messages": says([{"type": "image_url"}])}, "messages[0].content", "parts of the type text"),
    ({**CHAT, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "read 'a'"),
    ({**CHAT, "chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs", "'to"),
    ({"messages": [1] * 100_000}, "messages[0]", "valid dictionary"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": says("forbidden")}, "messages", "not that"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools", "not computed"),
    ({**CHAT, "response_format": {"type": "json_object"}}, "response_format", "not"),
    ({**CHAT, "reasoning_effort": "low"}, "reasoning_effort", "not computed"),
    ({**CHAT, "top_logprobs": 1}, "top_logprobs", "logprobs=true"),
    ({**CHAT, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "older"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD)
def test_a_bad_request_is_told_what_is_wrong(url: str, body: Any, param: str | None, message: str) -> None:
    path = "chat/completions" if "messages" in body else "completions"
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{url}/v1/{path}", content=json.dumps(body), headers=headers)  # surrogates as escapes
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert error["type"] == "invalid_request_error" and message in error["message"]


def test_the_engine_names_the_field_that_it_refuses() -> None:
    class Refusing(FakeEngine):
        def enter(self, requests: Any, deliver: Any) -> None:
            raise RequestError("the prompt has token 99999", param="prompt")

    with served(Refusing(byte_tokenizer())) as url:
        error = httpx.post(f"{url}/v1/completions", json={"prompt": [99999]}).json()["error"]
    assert (error["param"], error["message"]) == ("prompt", "the prompt has token 99999")


def test_errors_outside_the_body(url: str, client: Any) -> None:
    broken = httpx.post(f"{url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400 and "not valid JSON" in broken.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["message"] == "GET /v1/nothing: Not Found"
    assert httpx.get(f"{url}/v1/completions").status_code == 405
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("other/model")
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        client.completions.create(model="tiny", prompt="x", frequency_penalty=0.5)


def test_values_that_ask_for_nothing_are_accepted(url: str) -> None:
    both = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me", "stop": [], "store": False}
    none = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "function_call": "none"}
    ignored = {"metadata": {"a": "b"}, "prompt_cache_key": "k", "temperature": None, "max_tokens": 1}
    for path, body in (("completions", {**ASK, "best_of": 1}), ("chat/completions", {**CHAT, **none, **ignored})):
        assert httpx.post(f"{url}/v1/{path}", json={**body, **both}).status_code == 200


def test_models_health_and_metrics(client: Any, url: str) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "deltazoo"
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=2)
    answer = httpx.get(f"{url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    finished = {sample.labels["reason"]: sample.value for sample in families["deltazoo_finished"].samples}
    assert finished["length"] > 0 and set(finished) == {"stop", "length", "cancelled", "error"}
    assert families["deltazoo_time_to_first_token_seconds"].type == "histogram"
    assert all(sample.labels["model"] == "tiny" for family in families.values() for sample in family.samples)


def test_an_application_can_be_served_again_and_mounted_in_another() -> None:
    engine = FakeEngine(byte_tokenizer())
    app, other = create_app(engine, model="tiny"), fastapi.FastAPI()
    other.mount("/tiny", app)
    with engine:
        for served_app, path in ((app, ""), (app, ""), (other, "/tiny")):
            with background_server(served_app) as url:
                assert httpx.post(f"{url}{path}/v1/completions", json=ASK).status_code == 200


def test_a_key_is_required_of_all_but_health() -> None:
    with served(FakeEngine(byte_tokenizer()), api_key="secret") as url:
        for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
            for answer in (
                httpx.get(f"{url}/v1/models", headers=headers),
                httpx.get(f"{url}/metrics", headers=headers),
                httpx.post(f"{url}/v1/completions", json={}, headers=headers),
            ):
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{url}/health").status_code == 200
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret")
        assert client.completions.create(model="tiny", prompt="x").choices[0].text


def test_a_failure_of_the_model_reaches_the_client(url: str, client: Any) -> None:
    with pytest.raises(openai.InternalServerError, match="a matrix is not what it should be"):
        client.completions.create(model="tiny", prompt=[2], max_tokens=9)
    for prompt in ([2], [[2], [3]]):
        with pytest.raises(openai.APIError, match="a matrix is not what it should be"):
            list(client.completions.create(model="tiny", prompt=prompt, max_tokens=9, stream=True))
    assert client.completions.create(model="tiny", prompt=[3], max_tokens=9).choices[0].text


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = FakeEngine(byte_tokenizer(), places=1, max_queue=3)
    engine.steps = threading.Semaphore(0)
    with served(engine) as url:
        body = {"prompt": ["a", "b"], "max_tokens": 2}
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as first:
            assert first.status_code == 200
            refused = httpx.post(f"{url}/v1/completions", json=body)  # one of the two would have found a place
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
            assert refused.json()["error"]["code"] == "queue_full"
            engine.steps.release(100)
            assert first.read().endswith(b"data: [DONE]\n\n")
        wait_until(lambda: sum(engine.finished.values()) == 2)
        assert engine.finished["length"] == 2
        never = httpx.post(f"{url}/v1/completions", json={**body, "n": 2})
        assert never.status_code == 400
        assert "makes 4 choices, and at most 3 can wait" in never.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True], ids=["running", "waiting"])
def test_a_client_that_hangs_up_frees_its_place(stream: bool, waits: bool) -> None:
    engine = FakeEngine(byte_tokenizer(), places=1)
    engine.steps = threading.Semaphore(0)
    with served(engine) as url, httpx.Client(base_url=url) as other:
        body = {"prompt": "x", "max_tokens": 1000}
        if waits:
            blocker = threading.Thread(target=lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=60))
            blocker.start()
            wait_until(lambda: len(engine.requests) == 1)
        with pytest.raises(httpx.ReadTimeout):
            other.post("/v1/completions", json={**body, "stream": stream}, timeout=0.2)
        other.close()
        asked = 2 if waits else 1
        assert len(engine.requests) == asked

        def cancelled() -> bool:
            engine.steps.release(1)
            return engine.finished["cancelled"] == 1

        wait_until(cancelled)
        if waits:
            engine.steps.release(2000)
            blocker.join()
            assert engine.finished["length"] == 1


def test_a_stopping_engine_is_said_to_be_one() -> None:
    engine = FakeEngine(byte_tokenizer())
    engine.steps = threading.Semaphore(0)
    with served(engine) as url, httpx.Client(base_url=url) as client, ThreadPoolExecutor(2) as pool:
        bodies = [{**ASK, "stream": stream} for stream in (False, True)]
        asked = [pool.submit(httpx.post, f"{url}/v1/completions", json=body) for body in bodies]
        wait_until(lambda: len(engine.requests) == 2)
        engine.stop(timeout=0)
        for asking, status in zip(asked, (503, 200), strict=True):
            assert asking.result().status_code == status
            assert "stopped before the request was finished" in asking.result().text
        refused = client.post("/v1/completions", json=ASK)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["message"] == "the server takes no new requests: it has been stopped"
        assert client.get("/health").status_code == 503


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "\n", "schlüssel", "\x00", "a\x7f", "日本"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="the API key is sent in a header"):
        create_app(FakeEngine(byte_tokenizer()), model="tiny", api_key=key)


def test_a_tokenizer_of_another_library_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizers library .*, got a object"):
        create_app(FakeEngine(object()), model="tiny")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_not_read(chunked: bool) -> None:
    engine = FakeEngine(byte_tokenizer())
    with served(engine, max_body=1000) as url:
        content = json.dumps({"prompt": "x" * 900, "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json"}
        assert httpx.post(f"{url}/v1/completions", content=content, headers=headers).status_code == 200
        long = content.replace(b"x", b"x" * 50)
        sent = (long[i : i + 1000] for i in range(0, len(long), 1000)) if chunked else long
        answer = httpx.post(f"{url}/v1/completions", content=sent, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (413, "application/json")
        assert "at most 1000 bytes are read, see --max-body" in answer.json()["error"]["message"]
        assert len(engine.requests) == 1
        assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200


def test_a_request_that_does_not_come_whole_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "_RECEIVE_TIME", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with served(FakeEngine(byte_tokenizer(), seconds=0.05)) as url, httpx.Client(base_url=url) as client:
        assert client.get("/health").status_code == 200
        for sent in (
            b"",
            b"POST /v1/comp",
            b"GET /health HTTP/1.1\r\nHost: x\r\nAccept: ",
            head + b"Content-Length: 9\r\n\r\n{",
        ):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5) as half_open:
                half_open.sendall(sent)
                began = time.monotonic()
                with suppress(ConnectionResetError):
                    assert half_open.recv(100) == b""
                assert 0.2 < time.monotonic() - began < 2
        # An answer may take longer, and so may the next request on a connection that is kept.
        assert client.post("/v1/completions", json=ASK).status_code == 200
        time.sleep(0.4)
        assert client.get("/health").status_code == 200


def test_a_fault_in_a_body_that_has_been_answered_ends_its_connection_alone() -> None:
    with served(FakeEngine(byte_tokenizer()), api_key="secret") as url:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.sendall(head + b"1\r\n{\r\n")
            assert client.recv(4000).startswith(b"HTTP/1.1 401")
            client.sendall(b"no length\r\n")
            while True:
                try:
                    if not client.recv(4000):
                        break
                except ConnectionResetError:
                    break
        assert httpx.get(f"{url}/health").status_code == 200


def test_idle_connections_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Connection, "most", 5)
    engine = FakeEngine(byte_tokenizer())
    engine.steps = threading.Semaphore(0)
    with served(engine) as url, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(httpx.post, f"{url}/v1/completions", json=ASK) for _ in range(2)]
        wait_until(lambda: len(engine.requests) == 2)
        port = int(url.rpartition(":")[2])
        idle = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(40)]
        assert httpx.get(f"{url}/health").status_code == 200
        engine.steps.release(100)
        assert [answer.result().status_code for answer in running] == [200, 200]
        for connection in idle:
            connection.close()


def test_a_client_that_hangs_up_ends_the_work_on_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_CHILD", SLEEP)

    def children() -> list[Any]:
        found = []
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                found += [child] if SLEEP in child.cmdline() else []  # of one that has ended it is empty
        return found

    engine = FakeEngine(byte_tokenizer(TEMPLATE))
    engine.context_limit = None
    with served(engine) as url:
        long = "x" * 150_000
        bodies = {"completions": {"prompt": long}, "chat/completions": {"messages": says(long)}}
        clients = []
        for path in (*bodies, "completions"):
            content = json.dumps(bodies[path])
            head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}"
            clients.append(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
            clients[-1].sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n{content}".encode())
        wait_until(lambda: len(children()) == 2, 20)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "short", "max_tokens": 1}).status_code == 200
        for client in clients:
            client.close()
        wait_until(lambda: not children())
        assert len(engine.requests) == 1


def test_an_address_that_is_taken_is_an_error_at_once_and_is_free_after_use() -> None:
    """While the first server loads its model, too."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError, match=rf"cannot listen at 127\.0\.0\.1, port {port}: .*in use"):
            bind("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = first.accept()
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # or parts of answers wait 40 ms
            accepted.close()  # the side that closes first keeps the address for a minute
            assert client.recv(1) == b""
    bind("127.0.0.1", port).close()
    with pytest.raises(OSError, match=r"cannot listen at no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    try:
        address = bind("::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6 address of its own")
    with address:
        assert url_of(address) == f"http://[::1]:{address.getsockname()[1]}"
