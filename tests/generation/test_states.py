"""States taken out of caches, put back, forked and saved: bit for bit, for every rule and every kind of model."""

import copy
import json

import pytest
import torch
from decoding_loops import ACCELERATED, DEVICES, model_of, same
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import STATES, tiny_model, tokens
from transformers import DynamicCache

import deltazoo
from deltazoo.generation import Decoder
from deltazoo.generation.row_table import RowStates
from deltazoo.generation.states import Snapshot, detach, fork, move_cache, restore, snapshot
from deltazoo.generation.static_cache import fixed_cache
from deltazoo.layers.state import meta_state

SWAPPED = ["llama 1:1", "gemma3_text 1:1", "llama all"]
KINDS = ["kda_without_conv", "hybrid", *SWAPPED, ACCELERATED[0], ACCELERATED[-1]]


def run(model, cache, ids):
    """Logits after tokens that go into the cache, and the cache."""
    with torch.no_grad():
        output = model(ids, past_key_values=cache, use_cache=True)
    return output.logits, output.past_key_values


@pytest.mark.parametrize("kind", [*STATES, *SWAPPED, *ACCELERATED])
def test_restored_states_go_on_bit_for_bit(kind, tmp_path):
    """In the same cache, in a fresh one, forked, by rows, and read from a file."""
    model, ids, more = model_of(kind), tokens(2, 7), tokens(2, 3, seed=1)
    _, cache = run(model, None, ids)
    saved = snapshot(cache)
    expected, _ = run(model, cache, more)
    after = snapshot(cache)
    assert after.num_tokens == 10 and not same(after, saved)

    restore(cache, saved)
    assert same(snapshot(cache), saved)
    assert torch.equal(run(model, cache, more)[0], expected)
    assert same(snapshot(cache), after)

    saved.save(tmp_path / "states", model)
    read = Snapshot.load(tmp_path / "states", model)
    assert same(read, saved)
    fresh = DynamicCache(config=model.config)
    restore(fresh, read)
    assert torch.equal(run(model, fresh, more)[0], expected)
    assert same(snapshot(fresh), after)

    fork(fresh, 2)
    assert same(snapshot(fresh), after.select([0, 0, 1, 1]))
    restore(fresh, after.select([1, 0]), rows=[0, 3])
    assert same(snapshot(fresh), after.select([1, 0, 1, 0]))
    assert same(snapshot(fresh, rows=[3, 0]), after)


@pytest.mark.parametrize("kind", KINDS)
def test_detached_states_go_on_without_their_gradients(kind):
    """Segments compute what the whole does, with the gradients of segments that start from given states."""
    model = model_of(kind)
    embedded = model.get_input_embeddings()(tokens(2, 12)).detach()
    with torch.no_grad():
        whole = model(inputs_embeds=embedded).logits

    def segments(go_on):
        """Per segment logits, and gradients after its backward pass: of all inputs so far, and of parameters."""
        model.zero_grad()
        inputs, cache = [x.clone().requires_grad_() for x in embedded.split(4, dim=1)], None
        for x in inputs:
            output = model(inputs_embeds=x, past_key_values=cache, use_cache=True)
            output.logits.square().mean().backward()
            cache = go_on(output.past_key_values)
            gradients = [*(y.grad for y in inputs), *(p.grad for p in model.parameters())]
            yield output.logits.detach(), [None if g is None else g.clone() for g in gradients]

    def in_a_fresh_cache(cache):
        fresh = DynamicCache(config=model.config)
        restore(fresh, snapshot(cache).with_tensors(torch.Tensor.detach))
        return fresh

    found = list(segments(detach))
    torch.testing.assert_close(torch.cat([logits for logits, _ in found], dim=1), whole, rtol=1e-4, atol=1e-5)
    for (_, gradients), (_, wanted) in zip(found, segments(in_a_fresh_cache), strict=True):
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(gradients, wanted, strict=True))
    first = [gradients[0] for _, gradients in found]
    assert first[0].abs().sum((0, 2)).all() and all(torch.equal(x, first[0]) for x in first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        list(segments(lambda cache: cache))


def static_cache(model, saved=None, max_length=24):
    cache = fixed_cache(model, max_length)
    if saved is not None:
        restore(cache, saved)
    return cache


def addresses(cache):
    tensors = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    states = [x for layer in cache.layers for x in getattr(layer, "recurrent_states", {}).values()]
    return [x.data_ptr() for x in (*tensors, *states)]


@pytest.mark.parametrize("kind", [*KINDS, *ACCELERATED[1:-1]])
def test_states_move_between_growing_and_static_caches(kind):
    model, ids = model_of(kind), tokens(2, 7)
    _, growing = run(model, None, ids)
    saved = snapshot(growing)
    static = static_cache(model, saved)
    assert same(snapshot(static), saved)
    places = addresses(static)
    run(model, static, tokens(2, 1))
    restore(static, saved)
    assert same(snapshot(static), saved)
    restore(static, snapshot(growing, rows=[1]), rows=[0])
    assert same(snapshot(static), saved.select([1, 1])) and addresses(static) == places
    static.reset()
    move_cache(growing, static)
    assert same(snapshot(static), saved) and addresses(static) == places and not growing.layers
    restore(static, saved.select([1, 1]))
    back = DynamicCache(config=model.config)
    restore(back, snapshot(static))
    assert same(snapshot(back), saved.select([1, 1]))


@pytest.mark.parametrize(
    ("kind", "static"),
    [*((kind, False) for kind in KINDS), *((kind, True) for kind in KINDS if kind != ACCELERATED[0])],
)
def test_a_row_joins_a_longer_batch(kind, static):
    """It goes on there as it does alone, and its state leaves the batch as it came."""
    model, long, short, more = model_of(kind), tokens(2, 9), tokens(1, 4, seed=1), tokens(2, 1, seed=2)
    _, batch = run(model, None, long)
    if static:
        batch = static_cache(model, snapshot(batch))
    _, cache = run(model, None, short)
    row = snapshot(cache)
    restore(batch, row, rows=[1])
    assert same(snapshot(batch, rows=[1], num_tokens=4), row)

    mask = torch.ones(2, 24 if static else 10, dtype=torch.long)
    mask[1, :5] = 0
    with torch.no_grad():
        inputs = model.prepare_inputs_for_generation(
            more, past_key_values=batch, attention_mask=mask, position_ids=torch.tensor([[9], [4]]), use_cache=True
        )
        together = model(**inputs).logits
    first, second = run(model, None, torch.cat([long[:1], more[:1]], 1))[0][:, -1:], run(model, cache, more[1:])[0]
    expected = torch.cat([first, second])
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gated_deltanet", "kda_without_conv", "longhorn", "hybrid"])
def test_rows_are_those_of_snapshots(kind, device):
    """Taken, put, moved and emptied one by one, to the last bit; no other row changes. Weights of half the precision
    make states of two dtypes."""
    model = tiny_model(kind).to(device, torch.bfloat16)

    def filled(rows, start):
        return run(model, fixed_cache(model, 16), tokens(rows, 5 + start)[:, start:].to(device))[1]

    cache, other = filled(4, 0), filled(3, 2)
    dtypes = {x.dtype for layer in snapshot(cache).layers for x in layer.values()}
    assert len(dtypes) == (1 if kind == "kda_without_conv" else 2)
    states, before = RowStates(cache), snapshot(cache)
    assert states.recurrent == (kind != "hybrid")
    taken, expected = RowStates(other).take(2, 5), snapshot(other, rows=[2])
    assert same(taken, expected)
    restore(other, before.select([0, 0, 0]))  # what was taken is a copy
    states.put(1, taken)
    assert same(snapshot(cache, rows=[1]), expected)
    assert same(snapshot(cache, rows=[0, 2, 3]), before.select([0, 2, 3]))
    states.move([], [])
    states.move([2, 1], [3, 0])
    for row, wanted in enumerate((expected, expected, before.select([2]), before.select([2]))):
        assert same(snapshot(cache, rows=[row]), wanted) and same(states.take(row, 5), wanted)
    states.put(2, None)
    assert not any(x.any() for layer in snapshot(cache, rows=[2]).layers for x in layer.values())
    assert same(snapshot(cache, rows=[1]), expected) and same(snapshot(cache, rows=[3]), before.select([2]))
    states.put(0, states.take(1, 3))
    for layer, wanted in zip(snapshot(cache, rows=[0]).layers, expected.layers, strict=True):
        for name, x in layer.items():
            held = slice(3) if name in ("keys", "values") else slice(None)
            assert torch.equal(x[:, :, held], wanted[name][:, :, held])
            assert name not in ("keys", "values") or not x[:, :, 3:].any(), "nobody's keys"


def test_room_for_a_longer_row():
    model, short, long, more = tiny_model("hybrid"), tokens(2, 4), tokens(1, 9, seed=1), tokens(2, 1, seed=2)
    batch, cache = run(model, None, short)[1], run(model, None, long)[1]
    with pytest.raises(ValueError, match="a row of 9 tokens cannot join a batch of 4"):
        restore(batch, snapshot(cache), rows=[0])
    restore(batch, snapshot(batch).padded(9))
    restore(batch, snapshot(cache), rows=[0])
    mask = torch.tensor([[1] * 10, [0] * 5 + [1] * 5])
    with torch.no_grad():
        together = model(more, past_key_values=batch, attention_mask=mask).logits
    rows = torch.cat([long, more[:1]], 1), torch.cat([short[1:], more[1:]], 1)
    torch.testing.assert_close(together, torch.cat([run(model, None, ids)[0][:, -1:] for ids in rows]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["kda_without_conv", "hybrid", "llama 1:1", "qwen3_next"])
def test_captured_steps_go_on_from_restored_states(kind, device):
    """Also where the rows have changed places."""
    model, ids = model_of(kind).to(device), tokens(2, 6).to(device)
    decoder = Decoder(model, 2, max_length=24, eos_token_id=[])
    list(decoder.stream(ids, max_new_tokens=3))
    saved, token, position = snapshot(decoder.cache), decoder.token.clone(), decoder.position.clone()
    places, made = addresses(decoder.cache), []
    for rows in ([0, 1], [1, 0]):
        restore(decoder.cache, saved, rows=rows)
        decoder.token.copy_(token[rows])
        decoder.position.copy_(position[rows])
        steps = []
        for _ in range(5):
            decoder._advance(first=False)
            steps.append(decoder.token.clone())
        made.append(torch.cat(steps, dim=1)[rows])
        restore(decoder.cache, saved)
    assert torch.equal(*made) and addresses(decoder.cache) == places
    expected = deltazoo.generate(model, ids, max_new_tokens=8, eos_token_id=[])
    assert torch.equal(made[0], expected[:, -5:])


def test_a_snapshot_does_not_change():
    model = tiny_model("hybrid")
    _, cache = run(model, None, tokens(2, 5))
    saved = snapshot(cache)
    copy = Snapshot(saved.kinds, tuple({name: x.clone() for name, x in layer.items()} for layer in saved.layers), 5)
    run(model, cache, tokens(2, 3))
    restore(cache, saved)
    run(model, cache, tokens(2, 3))
    cache.reset()
    assert same(saved, copy)


@pytest.mark.parametrize("static", [False, True])
def test_an_empty_cache_has_an_empty_snapshot(static):
    model, ids = tiny_model("hybrid"), tokens(2, 5)
    cache = static_cache(model) if static else DynamicCache(config=model.config)
    model.prepare_cache(cache)
    empty = snapshot(cache)
    assert (empty.num_tokens, empty.num_rows, empty.nbytes, empty.device) == (0, 0, 0, None)
    expected, _ = run(model, cache, ids)
    restore(cache, empty)
    assert torch.equal(run(model, cache, ids)[0], expected)


def test_what_a_snapshot_says_of_itself():
    model = tiny_model("gated_deltanet")
    saved = snapshot(run(model, None, tokens(3, 5))[1])
    assert saved.kinds == ("delta_rule", "delta_rule") and (saved.num_tokens, saved.num_rows) == (5, 3)
    assert saved.device == torch.device("cpu") and same(saved.to("cpu"), saved)
    states = [meta_state(copy.deepcopy(layer.attn).to("meta")) for layer in model.model.layers]
    assert saved.nbytes == 3 * sum(x.nbytes for state in states for x in state if x is not None)
    assert saved.fork(2).nbytes == 2 * saved.nbytes


class TestRefusals:
    @pytest.fixture
    def saved(self):
        return snapshot(run(tiny_model("hybrid"), None, tokens(2, 5))[1])

    @pytest.mark.parametrize("rows", [[2], [-1], [[0]], [True, False], torch.tensor([False, True]), [0.7]])
    def test_rows_that_are_not_there(self, saved, rows):
        """A mask was read as rows 0 and 1, and 0.7 as 0."""
        _, cache = run(tiny_model("hybrid"), None, tokens(2, 5))
        numbers = isinstance(rows, list) and not isinstance(rows[0], bool | float)
        found = "rows must be a list of numbers from 0 to 1, got " + ("" if numbers else ".* values.*nonzero")
        for call in (saved.select, lambda rows: snapshot(cache, rows), lambda rows: restore(cache, saved, rows)):
            with pytest.raises(ValueError, match=found):
                call(rows)
        assert saved.select([]).num_rows == 0

    @pytest.mark.parametrize(
        ("kind", "changes", "num_rows", "rows", "message"),
        [
            ("hybrid", {}, 3, [0], "2 rows need as many different places"),
            ("hybrid", {}, 3, [0, 0], "2 rows need as many different places"),
            ("hybrid", {}, 3, [0, 1, 2], "2 rows need as many different places"),
            ("hybrid", {}, 0, [0, 1], "rows must be"),
            ("gated_deltanet", {"num_hidden_layers": 3}, 2, None, "3 layers and the states are of 2"),
            ("hybrid_softmax_first", {}, 2, None, "another model"),
            ("hybrid", {"head_dim": 4}, 2, [0, 1], "do not fit layer"),
            ("hybrid", {"use_short_conv": False}, 2, [0, 1], "do not fit layer"),
            ("hybrid", {"num_key_value_heads": 4}, 2, [0, 1], "do not fit layer"),
            ("hybrid", {"dtype": torch.bfloat16}, 2, None, "torch.float32.*torch.bfloat16"),
        ],
    )
    def test_caches_that_states_do_not_fit(self, saved, kind, changes, num_rows, rows, message):
        model = tiny_model(kind, **{key: x for key, x in changes.items() if key != "dtype"}).to(changes.get("dtype"))
        cache = run(model, None, tokens(num_rows, 5))[1] if num_rows else DynamicCache()
        before = snapshot(cache)
        with pytest.raises(ValueError, match=message):
            restore(cache, saved, rows=rows)
        assert not num_rows or same(snapshot(cache), before)

    def test_static_caches_keep_their_size(self, saved):
        cache = static_cache(tiny_model("hybrid"), saved, max_length=8)
        with pytest.raises(ValueError, match="4 rows cannot take the place of 2"):
            restore(cache, saved.fork(2))
        with pytest.raises(ValueError, match="9 tokens do not fit max_cache_len=8"):
            restore(cache, saved.padded(9))

    @pytest.mark.parametrize("kind", ["hybrid", "kda"])
    def test_snapshots_of_tokens_that_were_not_seen(self, kind):
        _, cache = run(tiny_model(kind), None, tokens(2, 5))
        for num_tokens in (6, -1, 3.5):
            with pytest.raises(ValueError, match=f"between 0 and the 5 tokens of the cache, got {num_tokens}"):
                snapshot(cache, num_tokens=num_tokens)

    def test_values_out_of_range(self, saved):
        with pytest.raises(ValueError, match="cannot become 4"):
            saved.padded(4)
        with pytest.raises(ValueError, match="n must be at least 1"):
            saved.fork(0)

    @pytest.mark.parametrize("take", [snapshot, detach])
    def test_unknown_layers(self, take):
        cache = DynamicCache()
        cache.layers = [type("OtherLayer", (), {})()]
        with pytest.raises(ValueError, match="contents of a OtherLayer cannot be taken out of a cache"):
            take(cache)


class TestFiles:
    @pytest.fixture
    def path(self, tmp_path):
        model = tiny_model("hybrid")
        snapshot(run(model, None, tokens(2, 5))[1]).save(tmp_path / "states", model)
        return tmp_path / "states"

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ({"mixer": "kda"}, "configuration and rules and weights"),
            ({"rope_theta": 500.0}, "configuration"),
            ({"allow_neg_eigval": True}, "configuration and rules"),
        ],
    )
    def test_other_configuration(self, path, change, what):
        with pytest.raises(ValueError, match=f"states of another model: {what} differ"):
            Snapshot.load(path, tiny_model("hybrid", **change))

    @pytest.mark.parametrize("kind", ["hybrid", "llama 1:1", ACCELERATED[-1]])
    def test_other_weights(self, kind, tmp_path):
        """One number anywhere, at its first change beyond the rounding to bfloat16, and none below it."""
        model = model_of(kind)
        model.register_buffer("bias", torch.rand(3))  # in the state dict, as biases of experts are
        snapshot(run(model, None, tokens(2, 5))[1]).save(tmp_path / "states", model)
        for i, (name, x) in enumerate(model.state_dict().items()):
            assert x.dtype == torch.float32, name
            place = (0, x.numel() // 2, x.numel() - 1)[i % 3]
            number = x.view(-1)[place]  # a part of the weight itself
            before, rounded = number.clone(), number.bfloat16()
            number.copy_(rounded)
            Snapshot.load(tmp_path / "states", model)
            number.copy_(torch.nextafter(rounded, rounded + 1))
            with pytest.raises(ValueError, match="states of another model: weights differ"):
                Snapshot.load(tmp_path / "states", model)
            number.copy_(before)
        Snapshot.load(tmp_path / "states", model)

    @pytest.mark.parametrize("kind", ["tied", "hybrid", "llama 1:1", "qwen3_next"])
    def test_a_copy_in_another_dtype_is_the_same_model(self, kind, tmp_path):
        """Also one that was saved and loaded, on another backend."""
        model = model_of(kind)
        snapshot(run(model, None, tokens(2, 5))[1]).save(tmp_path / "states", model)
        if kind == "hybrid":
            model.save_pretrained(tmp_path / "model")
            model = type(model).from_pretrained(tmp_path / "model", backend="reference")
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            assert Snapshot.load(tmp_path / "states", model.to(dtype)).num_tokens == 5

    def test_other_files(self, path):
        """And parts of one. The header is plain."""
        model, whole = tiny_model("hybrid"), path.read_bytes()
        with safe_open(path, framework="pt") as file:
            found = file.metadata()
        assert json.loads(found["kinds"]) == ["delta_rule", "softmax"] and found["num_tokens"] == "5"
        for content in (whole[:5], whole[:-50], b"", b"no tensors at all"):
            path.write_bytes(content)
            with pytest.raises(ValueError, match="states is no whole safetensors file"):
                Snapshot.load(path, model)
        for header, message in (({}, "no states"), ({"format": "deltazoo states", "version": "3"}, "3 .* reads 2")):
            save_file({"x": torch.zeros(1)}, path, header)
            with pytest.raises(ValueError, match=message):
                Snapshot.load(path, model)

    def test_a_folder_is_no_place_for_a_file(self, tmp_path, path):
        model, parts = tiny_model("hybrid"), len(list(tmp_path.iterdir()))
        (tmp_path / "folder").mkdir()
        with pytest.raises(IsADirectoryError):
            Snapshot.load(path, model).save(tmp_path / "folder", model)
        assert len(list(tmp_path.iterdir())) == parts + 1

    def test_weights_that_are_not_there(self, path):
        with pytest.raises(ValueError, match="embeddings.weight is not in memory"):
            Snapshot.load(path, tiny_model("hybrid").to("meta"))
