"""The engine: what a request gets does not depend on others, nobody waits for a long one, nothing is lost or kept."""

import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from decoding_loops import model_of
from foreign_models import foreign_model
from tiny_families import swapped, tiny_original
from tiny_serving import tiny

import deltazoo
from deltazoo.generation.row_table import PromptRows
from deltazoo.serving import Engine, EngineError, EngineStopped, QueueFull, Request, RequestError
from deltazoo.serving import engine as serving_engine
from deltazoo.serving.engine import _sizes_of_passes
from deltazoo.serving.prefill import Prefill, PrefixCache

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def prompt_of(length, text=0):
    return tuple(random.Random(f"{text} {length}").choices(range(2, 258), k=length))


def request(length=5, text=0, **options):
    """A greedy request of 6 tokens unless told otherwise."""
    return Request(prompt=prompt_of(length, text), **{"max_tokens": 6, "temperature": 0.0, **options})


def tokens_of(stream):
    return [token for piece in stream for token in piece.token_ids]


def result_of(stream):
    """Everything that a client sees, the log-probabilities to the last bit."""
    pieces = list(stream)
    logprobs = [one for piece in pieces for one in piece.logprobs or ()]
    return tokens_of(pieces), logprobs, pieces[-1].finish_reason


def all_at_once(engine, *requests):
    """The streams of requests that have all arrived when the engine starts."""
    engine._refusal = None
    streams = [engine.submit(one) for one in requests]
    engine.start()
    return streams


def recorded(engine, monkeypatch):
    """The order of passes and steps: ("pass", starts of the pieces) and ("step", width)."""
    calls = []
    run, step = engine.prompts.run, engine.table.step
    monkeypatch.setattr(
        engine.prompts, "run", lambda pieces: calls.append(("pass", [x for x, _ in pieces.values()])) or run(pieces)
    )
    monkeypatch.setattr(engine.table, "step", lambda width, way: (calls.append(("step", width)), step(width, way)))
    return calls


MIXED = [
    request(1, max_tokens=9),
    request(30, temperature=1.0, seed=1, logprobs=2),
    request(8, temperature=0.7, top_p=0.9, seed=-5),
    request(9, temperature=1.3, top_k=20, top_p=0.8, seed=7, logprobs=0),
    request(17, max_tokens=1),
    request(3, max_tokens=20, logprobs=5),
]


model_of_bytes = partial(model_of, vocab_size=258)


def assert_tokens_of_generate(engine, streams, **drawing):
    for stream in streams:
        prompt, count = torch.tensor([stream.request.prompt]), stream.request.max_tokens
        expected = deltazoo.generate(engine.model, prompt, max_new_tokens=count, eos_token_id=[], **drawing)
        assert tokens_of(stream) == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["gated_deltanet", "kda_without_conv", "hybrid", "llama 1:1", "qwen3_next"])
def test_greedy_tokens_are_those_of_generate(kind, engine_of):
    engine = engine_of(model_of_bytes(kind), widths=(1, 2, 4), context_limit=60)
    lengths = (1, 7, 8, 9, 40)
    streams = [engine.submit(request(length, max_tokens=12, ignore_eos=True)) for length in lengths]
    assert_tokens_of_generate(engine, streams)


@pytest.mark.parametrize("drawing", [{}, {"top_k": 20, "top_p": 0.8}])
def test_a_seed_draws_the_tokens_of_generate(drawing, engine_of):
    engine, drawing = engine_of(), {"temperature": 1.2, "seed": 7, **drawing}
    drawn, greedy = engine.submit(request(21, max_tokens=30, **drawing)), engine.submit(request(21, max_tokens=30))
    assert_tokens_of_generate(engine, [drawn], **drawing)
    assert tokens_of(engine.submit(drawn.request)) != tokens_of(greedy)


def test_a_model_without_our_layers_is_refused(engine_of):
    with pytest.raises(ValueError, match="with our delta-rule layers .* got LlamaForCausalLM"):
        engine_of(tiny_original("llama"))


def with_sizes(engine, sizes):
    """Passes over several prompts, with padding."""
    engine.prompts = PromptRows(engine.table, sizes, 8, padded=True)
    engine._prefill = Prefill(engine.prompts, engine.prefixes)
    return engine


def as_on_a_gpu(engine, sizes=(3,)):
    """The same, and the host a step behind."""
    with_sizes(engine, sizes)._ahead = 1
    engine.start()
    return engine


def test_sizes_of_passes():
    models = tiny("gated_deltanet"), tiny("hybrid"), foreign_model("qwen3_next")
    found = [[_sizes_of_passes(model, several=several) for model in models] for several in (True, False)]
    assert found == [[(1, 2, 4, 8, 16), (1, 2, 4), (1,)], [(8,), (4,), (1,)]]


def test_passes_of_several_sizes(engine_of, monkeypatch):
    """A pass is filled, and prompts go on from one size to another."""
    engine = with_sizes(engine_of(widths=(4, 8), start=False, prefix_memory=0), (1, 2, 4))
    calls = recorded(engine, monkeypatch)
    streams = all_at_once(engine, *(request(length, length, max_tokens=5) for length in (57, 33, 34, 17, 24, 12, 3)))
    assert_tokens_of_generate(engine, streams)
    counts = [len(starts) for name, starts in calls if name == "pass"]
    assert sum(counts) == 24 and set(counts) == {1, 2, 4}


def test_prompts_that_come_during_a_pass_share_a_later_one(engine_of, monkeypatch):
    """The second-last pass is waited for: those that begin meanwhile do not run one by one."""
    engine = as_on_a_gpu(engine_of(widths=(4,), start=False, prefix_memory=0))
    run, sizes, done = engine.prompts.run, [], threading.Semaphore(0)

    def counted(pieces):
        run(pieces)
        sizes.append(len(pieces))
        return done.acquire

    monkeypatch.setattr(engine.prompts, "run", counted)
    streams = []
    for count in range(4):
        streams.append(engine.submit(request(9, 3 * count, max_tokens=2)))
        while count < 2 and len(sizes) < count + 1:  # the first two passes begin at once
            time.sleep(0.001)
    assert sizes == [1, 1]
    done.release(10)
    assert [len(tokens_of(stream)) for stream in streams] == [2] * 4
    assert sizes == [1, 1, 2]


@pytest.mark.parametrize(
    ("case", "device", "arranged"),
    [
        ("hybrid_kda", "cpu", Engine.__enter__),
        ("gated_deltanet", "cpu", as_on_a_gpu),
        ("hybrid_kda", "cpu", as_on_a_gpu),
        pytest.param("gated_deltanet", "cuda", Engine.__enter__, marks=pytest.mark.gpu),
        pytest.param("hybrid_kda", "cuda", Engine.__enter__, marks=pytest.mark.gpu),
    ],
)
def test_a_crowd_changes_no_bit(case, device, arranged, engine_of):
    """At one width: each request alone in a fresh engine, then all of them among others that come and go."""
    model = tiny(case).to(device)
    alone = [result_of(arranged(engine_of(model, start=False)).submit(one)) for one in MIXED]
    crowd = arranged(engine_of(model, start=False))
    others = [crowd.submit(request(length, 9, temperature=1.0, max_tokens=length)) for length in (2, 40, 5, 11)]
    streams = [crowd.submit(one) for one in (*MIXED, *MIXED[::-1])]
    assert [result_of(stream) for stream in streams] == alone + alone[::-1]
    assert [len(tokens_of(stream)) for stream in others] == [2, 40, 5, 11]


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["delta_net", "gated_deltanet"])
def test_a_crowd_changes_no_bit_at_usual_sizes(mixer, engine_of):
    """Heads of 128 and wide matrices in bfloat16 take other kernels than tiny models."""
    sizes = {"hidden_size": 1024, "num_heads": 8, "head_dim": 128, "intermediate_size": 2816}
    model = tiny("gated_deltanet", mixer=mixer, initializer_range=0.05, **sizes).to("cuda", torch.bfloat16)
    engine = engine_of(model, widths=(32,), prompt_piece=128)
    kinds = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "top_p": 0.9, "seed": 4}]
    requests = [request(length, max_tokens=20, logprobs=1, **kind) for length in (1, 129, 300) for kind in kinds]
    alone = [result_of(engine_of(model, widths=(32,), prompt_piece=128).submit(one)) for one in requests]
    others = [engine.submit(request(10 * n, n, temperature=1.0, max_tokens=n)) for n in range(1, 30)]
    assert [result_of(engine.submit(one)) for one in requests] == alone
    streams = [engine.submit(one) for one in requests]
    assert [result_of(stream) for stream in streams] == alone
    assert [len(tokens_of(stream)) for stream in others] == [*range(1, 30)]


@pytest.mark.parametrize("device", DEVICES)
def test_widths_follow_the_rows_in_use(device, engine_of, monkeypatch):
    engine = engine_of(tiny().to(device), widths=(1, 2, 4), start=False)
    calls, moves = recorded(engine, monkeypatch), []
    move = engine.table.move
    monkeypatch.setattr(engine.table, "move", lambda *rows: (moves.append(rows), move(*rows)))
    counts = enumerate((3, 3, 3, 12))
    streams = all_at_once(engine, *(request(1, seed, max_tokens=count) for seed, count in counts))
    results = [tokens_of(stream) for stream in streams]
    engine.stop()
    widths = [width for name, width in calls if name == "step"]
    assert widths == [4] * 3 + [1] * 9 and moves == [([3], [0])]
    alone = engine_of(tiny().to(device), widths=(1,))
    assert results == [tokens_of(alone.submit(stream.request)) for stream in streams]


def test_a_long_prompt_holds_nobody_up(engine_of, monkeypatch):
    engine = engine_of(start=False)
    calls = recorded(engine, monkeypatch)
    for stream in all_at_once(engine, request(1, max_tokens=30), request(160, max_tokens=1), request(5, max_tokens=2)):
        list(stream)
    engine.stop()
    names = [name for name, _ in calls]
    passes = [starts for name, starts in calls if name == "pass"]
    assert names[:40] == ["pass", "step"] * 20, "a step comes between two passes while there are rows"
    assert [0] in passes[1:3], "the short prompt runs among the first pieces of the long one"
    assert [starts for starts in passes if starts != [0]] == [[start] for start in range(8, 160, 8)]


def test_the_oldest_prompt_is_not_overtaken_for_ever(engine_of, monkeypatch):
    engine = engine_of(start=False)
    calls = recorded(engine, monkeypatch)
    others = [request(17, seed, max_tokens=1) for seed in range(3)]
    for stream in all_at_once(engine, request(80, max_tokens=1), *others):
        list(stream)
    engine.stop()
    starts = [starts[0] for name, starts in calls if name == "pass"]
    assert starts[:6:2] == [0, 8, 16]


class TestPrefixes:
    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("case", ["gated_deltanet", "hybrid"])
    def test_a_hit_gives_the_bits_of_a_miss(self, case, device, engine_of):
        """Three turns of a conversation, and each once more."""
        model = tiny(case).to(device)
        with_cache, without = engine_of(model), engine_of(model, prefix_memory=0)
        options = {"temperature": 1.0, "seed": 3, "logprobs": 3, "max_tokens": 11}
        prompt, cached = prompt_of(21), []
        for turn in range(3):
            one = Request(prompt=prompt, **options)
            answer = result_of(without.submit(one))
            for _ in range(2):
                stream = with_cache.submit(one)
                assert result_of(stream) == answer
                cached.append(stream.cached_tokens)
            prompt = (*prompt, *answer[0], *prompt_of(6, turn))
        # Multiples of 8 within the former prompt; all but its last token the second time.
        assert cached == [0, 20, 16, 37, 32, 54]
        counters = with_cache.status().counters
        assert (counters["prefix_hits"], counters["prefix_misses"]) == (5, 1)
        assert counters["prefix_tokens"] == sum(cached)
        assert counters["prefix_bytes"] == with_cache.prefixes.nbytes > 0 == without.status().counters["prefix_bytes"]

    def test_samples_of_one_prompt_run_it_once(self, engine_of):
        engine = engine_of()
        first = result_of(engine.submit(request(30, temperature=1.0, seed=1)))
        passes = engine.status().counters["pieces"]
        more = [engine.submit(request(30, temperature=1.0, seed=seed)) for seed in range(1, 5)]
        results = [result_of(stream) for stream in more]
        assert passes == 4 == engine.status().counters["pieces"]
        assert results[0] == first and len({tuple(result[0]) for result in results}) == 4

    @pytest.mark.parametrize("size", [1, 3])
    def test_equal_prompts_that_arrive_together_run_once(self, size, engine_of, monkeypatch):
        engine = with_sizes(engine_of(start=False), [size])
        calls = recorded(engine, monkeypatch)
        same = [request(30, max_tokens=1), request(30, max_tokens=2), request(33, max_tokens=1)]
        same[2] = Request(prompt=(*same[0].prompt, 5, 6, 7), max_tokens=1, temperature=0)
        streams = all_at_once(engine, *same)
        results = [tokens_of(stream) for stream in streams]
        engine.stop()
        starts = sorted(start for name, starts in calls if name == "pass" for start in starts)
        assert starts == [0, 8, 16, 24, 24]
        assert sorted(stream.cached_tokens for stream in streams) == [0, 24, 29] and results[0] == results[1][:1]

    def test_memory_stays_within_its_bounds_and_what_goes_is_computed_again(self, engine_of):
        without = engine_of(prefix_memory=0)
        state = without.table.empty.nbytes
        engine, hits = engine_of(prefix_memory=3 * state + 1), []
        for text in (0, 1, 2, 2, 0, 1, 1):
            stream = engine.submit(request(20, text, logprobs=2))
            assert result_of(stream) == result_of(without.submit(request(20, text, logprobs=2)))
            hits.append(stream.cached_tokens)
            assert len(engine.prefixes) <= 3 and engine.prefixes.nbytes == len(engine.prefixes) * state
        assert hits == [0, 0, 0, 19, 0, 0, 19]


class TestSampling:
    def test_seeds(self, engine_of):
        engine = engine_of()
        seeds = [1, 1, 2, None, None]
        streams = [engine.submit(request(temperature=2.0, seed=seed, max_tokens=20)) for seed in seeds]
        made = [tuple(tokens_of(stream)) for stream in streams]
        assert made[0] == made[1] and len(set(made)) == 4
        assert streams[0].request.seed == 1
        assert (
            tuple(tokens_of(engine.submit(request(temperature=2.0, seed=streams[3].request.seed, max_tokens=20))))
            == made[3]
        )

    def test_logprobs(self, engine_of):
        engine = engine_of()
        stream = engine.submit(request(9, logprobs=3, max_tokens=4))
        tokens, logprobs, _ = result_of(stream)
        with torch.no_grad():
            logits = engine.model(torch.tensor([[*stream.request.prompt, *tokens[:-1]]])).logits[0, 8:]
        expected = logits.log_softmax(-1)
        for token, one, row in zip(tokens, logprobs, expected, strict=True):
            assert one.token_id == token == one.top[0][0] and len(one.top) == 3
            assert one.logprob == one.top[0][1] == pytest.approx(row[token].item(), abs=1e-4)
            assert [x for _, x in one.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)

    def test_equally_likely_tokens_come_in_one_order(self, engine_of):
        """However many of the likeliest another request asks for."""
        model = tiny()
        with torch.no_grad():
            for x in model.get_output_embeddings().weight[2:].split(64):
                x.copy_(x[:1].expand_as(x))
        engine = engine_of(model)
        alone = [result_of(engine.submit(request(9, logprobs=count))) for count in range(6)]
        for result, count in zip(alone, range(6), strict=True):
            streams = [engine.submit(request(9, logprobs=each)) for each in (20, count)]
            assert [result_of(stream) for stream in streams][1] == result


class TestEnds:
    def test_an_end_token(self, engine_of):
        made = tokens_of(engine_of().submit(request(max_tokens=8)))
        end = made[4]
        count = made.index(end) + 1
        engine = engine_of(ends=[end])
        assert result_of(engine.submit(request(max_tokens=8))) == (made[:count], [], "stop")
        assert tokens_of(engine.submit(request(max_tokens=8, ignore_eos=True))) == made

    def test_the_context_limit(self, engine_of):
        engine = engine_of(context_limit=20)
        stream = engine.submit(Request(prompt=prompt_of(13), temperature=0))
        assert len(tokens_of(stream)) == 7
        with pytest.raises(RequestError, match="20 tokens and at least 1 are to follow, .* limit of 20"):
            engine.submit(Request(prompt=(10**6,) * 20))  # before any token is looked at
        with pytest.raises(RequestError, match="13 tokens and at least 8"):
            engine.submit(request(13, max_tokens=8))

        engine = engine_of(tiny("hybrid", max_position_embeddings=16))
        stream = engine.submit(Request(prompt=prompt_of(4), temperature=0))
        assert len(tokens_of(stream)) == 12
        with pytest.raises(RequestError, match="limit of 16"):
            engine.submit(request(16))

    def test_positions_end_where_the_model_does(self, engine_of):
        """Of GPT-2 with linear layers alone: rows that are not in use read no positions past the last one."""
        model = swapped("gpt2", "all")
        longest = model.config.max_position_embeddings
        with pytest.raises(ValueError, match=f"at most the max_position_embeddings={longest} .* got {longest + 1}"):
            engine_of(model, start=False, context_limit=longest + 1)
        engine = engine_of(model, widths=(2,))
        both = [engine.submit(Request(prompt=(3, 4), temperature=0)) for _ in range(2)]
        assert [len(tokens_of(stream)) for stream in both] == [longest - 2] * 2
        assert len(tokens_of(engine.submit(Request(prompt=(5,), temperature=0, max_tokens=8)))) == 8

    def test_requests_that_do_not_fit(self, engine_of):
        engine = engine_of()
        with pytest.raises(RequestError, match="max_tokens is needed"):
            engine.submit(Request(prompt=(1,)))
        for token in (-1, 258):
            with pytest.raises(RequestError, match=f"token {token}, .* vocabulary of 258") as refused:
                engine.submit(Request(prompt=(5, token, 6), max_tokens=1))
            assert refused.value.param == "prompt"

    @pytest.mark.parametrize("ahead", [0, 1])
    def test_cancelling_frees_the_place(self, ahead, engine_of):
        engine = engine_of(widths=(1,), start=False)
        engine._ahead = ahead
        engine.start()
        endless = engine.submit(request(max_tokens=10**9))
        pieces = iter(endless)
        next(pieces)
        prefilling, waiting = (engine.submit(request(length, max_tokens=3)) for length in (300, 5))
        waiting.cancel()
        assert result_of(waiting) == ([], [], "cancelled")
        endless.cancel()
        assert list(pieces)[-1].finish_reason == "cancelled"
        prefilling.cancel()
        assert result_of(prefilling)[2] == "cancelled"
        assert len(tokens_of(engine.submit(request()))) == 6
        engine.stop()
        assert engine.status().finished == {"cancelled": 3, "length": 1}
        counters = engine.status().counters
        assert counters["running"] == counters["prefilling"] == counters["waiting"] == 0


class TestLimits:
    def test_the_queue(self, engine_of):
        engine = engine_of(widths=(1,), max_queue=2)
        first = engine.submit(request(max_tokens=10**9))
        next(iter(first))
        others = [engine.submit(request()) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests are waiting") as caught:
            engine.submit(request())
        assert 1 <= caught.value.retry_after <= 60 and engine.status().counters["rejected"] == 1
        assert engine.status().counters["waiting"] == 2
        first.cancel()
        assert [len(tokens_of(stream)) for stream in others] == [6, 6]

    def test_stopping_finishes_what_was_accepted(self, engine_of):
        engine = engine_of(widths=(2,))
        streams = [engine.submit(request(20, seed, max_tokens=20)) for seed in range(6)]
        engine.stop()
        assert [len(tokens_of(stream)) for stream in streams] == [20] * 6
        with pytest.raises(EngineStopped, match="stopping"):
            engine.submit(request())
        engine.stop()
        with pytest.raises(RuntimeError, match="started before"):
            engine.start()

    def test_after_a_while_stopping_cancels(self, engine_of):
        engine = engine_of(widths=(2,))
        streams = [engine.submit(request(max_tokens=10**9)) for _ in range(4)]
        began = time.monotonic()
        engine.stop(timeout=0.1)
        assert time.monotonic() - began < 5
        assert [list(stream)[-1].finish_reason for stream in streams] == ["cancelled"] * 4

    def test_options(self, engine_of):
        for name, value in (("widths", ()), ("prompt_piece", 0), ("max_queue", 0), ("prefix_memory", -1)):
            with pytest.raises(ValueError, match=rf"{name} must be at least (0, got -1|1, got 0)"):
                engine_of(start=False, **{name: value})


class TestFailures:
    def test_an_error_in_a_prompt_ends_that_request(self, engine_of, monkeypatch):
        engine = engine_of()
        other = engine.submit(request(max_tokens=40))
        next(iter(other))
        run = engine.prompts.run

        def fail_on_long_ones(pieces):
            if any(start >= 16 for start, _ in pieces.values()):
                raise RuntimeError("out of memory")
            return run(pieces)

        monkeypatch.setattr(engine.prompts, "run", fail_on_long_ones)
        with pytest.raises(EngineError, match="the model failed: out of memory"):
            list(engine.submit(request(30)))
        assert len(tokens_of(other)) >= 1
        assert len(tokens_of(engine.submit(request(10)))) == 6
        assert engine.status().finished["error"] == 1

    def test_an_error_in_a_step_ends_those_that_run(self, engine_of, monkeypatch):
        engine = engine_of()
        step, failing = engine.table.step, []

        def fail_once(width, way):
            if failing and failing.pop():
                raise RuntimeError("no")
            step(width, way)

        monkeypatch.setattr(engine.table, "step", fail_once)
        for _ in range(4):  # more than end the engine if none works in between
            failing.append(True)
            with pytest.raises(EngineError, match="the model failed: no"):
                list(engine.submit(request()))
            assert len(tokens_of(engine.submit(request()))) == 6

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("kind", ["hybrid", "qwen3_next"])
    def test_nan_ends_the_request_that_computes_it(self, kind, device, engine_of):
        """Others get what they got before, those in its row included, and whatever they ask for."""
        model = model_of_bytes(kind).to(device)
        engine = as_on_a_gpu(engine_of(model, start=False))
        others = [replace(one, prompt=tuple(token % 59 + 2 for token in one.prompt)) for one in MIXED]
        expected = [result_of(engine.submit(one)) for one in others]
        used = {token for one in others for token in one.prompt} | {token for made, *_ in expected for token in made}
        unused = next(token for token in range(2, model.get_input_embeddings().num_embeddings) if token not in used)
        model.get_input_embeddings().weight.data[unused] = float("nan")
        engine.prefixes = engine._prefill.prefixes = PrefixCache(0)
        bad = {"prompt": (3, unused, *range(4, 20)), "max_tokens": 5}
        ways = {}, {"logprobs": 3}, {"temperature": 0.0}, {"temperature": 0.0, "logprobs": 0}, {"top_p": 0.5}
        failing = [engine.submit(Request(**bad, **way)) for way in ways]
        streams = [engine.submit(one) for one in others]
        for stream in failing:
            found = "the model failed: it computed NaN or infinite logits for new token 1; NaN comes first in .*embed"
            with pytest.raises(EngineError, match=found):
                list(stream)
        assert [result_of(stream) for stream in streams] == expected
        engine.stop()
        counters = engine.status().counters
        assert counters["running"] == counters["prefilling"] == 0 and engine.status().finished["error"] == len(ways)
        assert counters["completion_tokens"] == 2 * sum(len(made) for made, *_ in expected)

    def test_nan_after_some_tokens(self, engine_of):
        """They are handed out, and then the error comes."""
        model = tiny()
        engine = as_on_a_gpu(engine_of(model, start=False))
        made = tokens_of(engine.submit(request(max_tokens=8)))
        place = next(i for i in range(1, 7) if made[i] not in {*prompt_of(5), *made[:i]})
        model.get_input_embeddings().weight.data[made[place]] = float("nan")
        received = []
        with pytest.raises(EngineError, match=f"for new token {place + 2}$"):
            received.extend(token for piece in engine.submit(request(max_tokens=8)) for token in piece.token_ids)
        assert received == made[: place + 1]

    def test_a_lost_device_ends_everything(self, engine_of, monkeypatch):
        engine = engine_of(widths=(1,), start=False)

        def fail(width, way):
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(engine.table, "step", fail)
        engine.start()
        streams = []
        with pytest.raises(EngineStopped, match="the engine has failed: the device is lost"):
            while True:
                streams.append(engine.submit(request()))
                time.sleep(0.001)
        for stream in streams:
            with pytest.raises(EngineError, match="lost"):
                list(stream)
        engine.stop()
        with pytest.raises(EngineStopped, match="the engine has failed: the device is lost"):
            engine.submit(request())

    def test_a_device_that_is_lost_in_a_prompt_ends_everything(self, engine_of, monkeypatch):
        engine = engine_of()
        running = engine.submit(request(max_tokens=10**9))
        next(iter(running))

        def fail(*_):
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(engine.prompts, "run", fail)
        monkeypatch.setattr(serving_engine, "_check_device", fail)
        for stream in (engine.submit(request(20)), running):
            with pytest.raises(EngineError, match="lost"):
                list(stream)
        engine._thread.join(10)
        status = engine.status()
        assert not status.running and status.counters["running"] == status.counters["prefilling"] == 0

    def test_a_step_that_cannot_be_captured(self, engine_of, monkeypatch):
        engine = engine_of(start=False)

        def fail():
            raise RuntimeError("_local_scalar_dense waits for the device")

        monkeypatch.setattr(engine.table, "capture", fail)
        with pytest.raises(RuntimeError, match="waits for the device"):
            engine.start()
        with pytest.raises(EngineStopped, match="not been started"):
            engine.submit(request())


def test_many_clients_in_threads(engine_of):
    """None is lost, none gets another's tokens, some hang up."""
    engine = engine_of(widths=(2, 8))
    requests = [request(seed + 1, seed, temperature=1.0, seed=seed) for seed in range(12)]
    expected = [tokens_of(engine.submit(one)) for one in requests]

    def client(number):
        for turn in range(number, number + 4):
            stream = engine.submit(requests[turn % 12])
            if turn % 10 == 0:
                next(iter(stream))
                stream.cancel()
                list(stream)
            else:
                assert tokens_of(stream) == expected[turn % 12]

    with ThreadPoolExecutor(24) as threads:
        list(threads.map(client, range(24)))
    engine.stop()
    assert sum(engine.status().finished.values()) == 12 + 24 * 4


def test_nothing_is_kept_of_requests(engine_of):
    engine = engine_of(tiny(num_hidden_layers=1), widths=(32,), prefix_memory=10_000, max_queue=3000)
    counts = []
    for _ in range(4):
        streams = [engine.submit(request(1 + (number % 10 == 0), number, max_tokens=2)) for number in range(400)]
        assert all(len(tokens_of(stream)) == 2 for stream in streams)
        del streams
        while engine.status().counters["running"]:
            time.sleep(0.01)
        gc.collect()
        counts.append(len(gc.get_objects()))
    counts = counts[1:]  # during the first round what other tests left may still go
    assert max(counts) - min(counts) < 200, counts
