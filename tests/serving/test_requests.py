"""Requests refuse values out of range; a stream hands its pieces to threads and coroutines, none lost."""

import asyncio
import threading
import time

import pytest

from deltazoo.serving import EngineError, Piece, Request, RequestError, Stream, TokenLogprob

PROMPT = (1, 2, 3)


def stream(cancelled=None):
    return Stream(Request(prompt=PROMPT, seed=5), (cancelled if cancelled is not None else []).append)


def put(one, *outputs):
    Stream.deliver((one, output) for output in outputs)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": ()}, "at least one token"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be between 0 and 1e30, got -1.0"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": 1e39}, "got 1e\\+39"),
        ({"top_k": 0}, "top_k must be at least 1 and fit 64 bits, got 0"),
        ({"top_k": 2**63}, "got 9223372036854775808"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"seed": 2**63}, "64 bits"),
        ({"logprobs": 21}, "between 0 and 20, got 21"),
    ],
)
def test_requests_out_of_range(values, message):
    with pytest.raises(RequestError, match=message):
        Request(**{"prompt": PROMPT, **values})


def test_outputs_that_wait_become_one_piece():
    one = stream()
    logprob = TokenLogprob(token_id=4, logprob=-0.5, top=((4, -0.5),))
    put(one, Piece(token_ids=(3,), logprobs=(logprob,), cached_tokens=2), Piece(token_ids=(4,), logprobs=(logprob,)))
    assert next(iter(one)) == Piece(token_ids=(3, 4), logprobs=(logprob, logprob), cached_tokens=2)
    assert (one.prompt_tokens, one.cached_tokens, one.completion_tokens, one.seed) == (3, 2, 2, 5)
    put(one, 5, 6, Piece(token_ids=(7,), finish_reason="stop"))
    assert [*one] == [Piece(token_ids=(5, 6, 7), finish_reason="stop")] and one.completion_tokens == 5
    assert [*one] == []


def write(one, count):
    for number in range(count):
        Stream.deliver([(one, Piece(token_ids=(number,), finish_reason="length") if number == count - 1 else number)])
        if number % 7 == 0:
            time.sleep(0.001)


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
def test_a_reader_gets_every_token(kind):
    one = stream()

    async def read():
        return [token async for piece in one for token in piece.token_ids]

    writer = threading.Thread(target=write, args=(one, 200))
    writer.start()
    received = asyncio.run(read()) if kind == "coroutine" else [token for piece in one for token in piece.token_ids]
    writer.join()
    assert received == list(range(200))


def test_an_error_comes_after_what_was_made():
    async def read(one):
        return [piece async for piece in one]

    for reading in (list, lambda one: asyncio.run(read(one))):
        one = stream()
        put(one, 1, 2, EngineError("the model failed: no"))
        with pytest.raises(EngineError, match="the model failed: no"):
            reading(one)
        assert one.completion_tokens == 2 and [*one] == []


def test_a_reader_whose_loop_has_closed_does_not_stop_the_writer(monkeypatch):
    one, other = stream(), stream()

    async def read_one_piece():
        async for _ in one:
            return

    put(one, 1)
    asyncio.run(read_one_piece())
    monkeypatch.setattr(one._reader[0], "is_closed", lambda: False)  # it closes just after the writer has asked
    Stream.deliver((each, Piece(finish_reason="stop")) for each in (one, other))
    assert list(other) == [Piece(finish_reason="stop")]


def test_cancelling_tells_the_engine_until_the_end_has_come():
    cancelled = []
    one = stream(cancelled)
    one.cancel()
    assert cancelled == [one]
    put(one, Piece(finish_reason="cancelled"))
    assert [piece.finish_reason for piece in one] == ["cancelled"]
    one.cancel()
    assert cancelled == [one]


def test_in_a_pause_tokens_come_together_and_the_last_one_ends_it():
    async def read():
        one, found = stream(), []
        one.pause = 20.0
        put(one, 1)
        async for piece in one:
            found.append(piece.token_ids)
            if len(found) == 1:
                for delay, output in ((0.05, 2), (0.1, 3), (0.15, Piece(token_ids=(4,), finish_reason="length"))):
                    asyncio.get_running_loop().call_later(delay, put, one, output)
        return found

    assert asyncio.run(asyncio.wait_for(read(), 10)) == [(1,), (2, 3, 4)]
