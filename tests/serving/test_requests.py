"""Requests refuse values out of range; a stream hands all pieces to its reader."""

import threading
import time

import pytest

from deltazoo.serving import EngineError, Piece, Request, RequestError, Stream, TokenLogprob

PROMPT = (1, 2, 3)


def stream(on_cancel=None):
    return Stream(Request(prompt=PROMPT, seed=5), on_cancel)


def put(one, *outputs):
    Stream.put_all((one, output) for output in outputs)


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
    assert one.cached_tokens == 2
    put(one, 5, 6, Piece(token_ids=(7,), finish_reason="stop"))
    assert [*one] == [Piece(token_ids=(5, 6, 7), finish_reason="stop")]
    assert [*one] == []


def test_a_reader_in_another_thread_gets_every_token():
    one = stream()

    def write(count=200):
        for number in range(count):
            one.put(Piece(token_ids=(number,), finish_reason="length") if number == count - 1 else number)
            if number % 7 == 0:
                time.sleep(0.001)

    writer = threading.Thread(target=write)
    writer.start()
    received = [token for piece in one for token in piece.token_ids]
    writer.join()
    assert received == list(range(200))


def test_an_error_comes_after_what_was_made():
    one, received = stream(), []
    put(one, 1, 2, EngineError("the model failed: no"))
    with pytest.raises(EngineError, match="the model failed: no"):
        received.extend(one)  # until it comes
    assert [piece.token_ids for piece in received] == [(1, 2)] and [*one] == []


def test_cancelling_tells_the_engine_until_the_end_has_come():
    cancelled = []
    one = stream(lambda: cancelled.append(True))
    one.cancel()
    assert len(cancelled) == 1
    put(one, Piece(finish_reason="cancelled"))
    assert [piece.finish_reason for piece in one] == ["cancelled"]
    one.cancel()
    assert len(cancelled) == 1
