"""A table of rows: prompts in pieces and steps of several widths give the tokens of `generate`, rows apart from each
other to the last bit."""

from functools import partial

import pytest
import torch
from decoding_loops import (
    ACCELERATED,
    DEVICES,
    assert_decodes_like_forward,
    in_a_table,
    model_of,
    own,
    same,
    state_after,
)
from tiny_families import swapped
from tiny_models import CASES, STATES, tiny_model, tokens

from deltazoo.generation import Sampling, row_table, step
from deltazoo.generation.row_table import PromptRows, RowTable
from deltazoo.generation.sampling import Way

HYBRID = ["softmax_only", "hybrid", "hybrid_softmax_first", "hybrid_without_conv"]
FAMILIES = [family for family in ("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear") if family in ACCELERATED]
MOST = 40
"""Tokens of a row in tests of hybrids."""
FEW = ["gated_deltanet", "kda_without_conv"]
KINDS = [*FEW, "hybrid", "hybrid_softmax_first", "llama 1:1", "llama all", *FAMILIES]
PIECE = 8
LEFT = torch.tensor([[1] * 20, [0] * 14 + [1] * 6])


def continued(table, row, width, count, way=Way.GREEDY):
    made = []
    for _ in range(count):
        table.step(width, way)
        made.append(table.read_tokens(width)()[row].item())
    return made


def tensors(state):
    return [x for layer in state.layers for x in layer.values()]


UNPADDED = [*FEW, "pkda", *HYBRID, "llama 1:1", *FAMILIES]


@pytest.mark.parametrize(
    ("kind", "padded", "device"),
    [
        *((kind, True, "cpu") for kind in CASES if kind in STATES and kind not in KINDS),
        *((kind, False, "cpu") for kind in UNPADDED),
        *(
            pytest.param(kind, padded, "cuda", marks=pytest.mark.gpu)
            for kind in dict.fromkeys([*CASES, *KINDS, "gpt2 1:1"])
            for padded in (False, True)
        ),
    ],
)
def test_tokens_are_the_likeliest(kind, padded, device):
    model = model_of(kind).to(device)
    assert_decodes_like_forward(model, partial(in_a_table, padded=padded), tokens(2, 20), mask=LEFT)


@pytest.mark.parametrize("kind", [*KINDS, "gpt2 1:1"])
def test_graphs_of_passes_and_steps(kind, replays, monkeypatch):
    """They hold no operation that a CUDA graph could not, and nothing that Python did at a capture is missing."""
    monkeypatch.setattr(row_table, "capture", step.capture)
    assert_decodes_like_forward(model_of(kind), in_a_table, tokens(2, 20), mask=LEFT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.5, 20, 0.9)], ids=str)
@pytest.mark.parametrize("kind", ["kda_without_conv", "hybrid", "llama 1:1"])
def test_a_seed_draws_the_same_everywhere(kind, sampling, device):
    """In `generate` alone and in a batch with padding, and in a table where rows move meanwhile."""
    model, lengths, seed = model_of(kind).to(device), [20, 6, 11], 2**40
    ids = tokens(3, 20).to(device)
    mask = torch.tensor([[0] * (20 - length) + [1] * length for length in lengths], device=device)
    options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    made = own(model, ids, mask, 8, seed=seed, **options)
    for row, length in enumerate(lengths):
        alone = own(model, ids[row : row + 1, -length:], None, 8, seed=seed + row, **options)
        assert torch.equal(alone[0, length:], made[row, 20:])
    assert len({tuple(x) for x in made[:, 20:].tolist()}) == 3
    assert torch.equal(in_a_table(model, ids, mask, 8, padded=False, sampling=sampling, seed=seed), made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*FEW, "pkda", "hybrid", "micro_steps"])
def test_passes_keep_rows_apart(case, device):
    """Other rows change no bit, and padding, here beyond the last column, differs from none by rounding."""
    model, most = tiny_model(case).to(device), 27
    table = RowTable(model, [1], most)
    alone, together, exact = (PromptRows(table, [3], PIECE, padded=padded) for padded in (True, True, False))
    ids, lengths = tokens(3, 30).tolist(), {0: 2, 1: 27, 2: 19}  # the first is shorter than the convolution
    expected = {row: state_after(alone, row, ids[row][:length]) for row, length in lengths.items()}
    states = dict.fromkeys(lengths)
    for start in range(0, 26, PIECE):
        pieces = {row: ids[row][start : min(start + PIECE, length - 1)] for row, length in lengths.items()}
        chosen = {row: (start, x) for row, x in pieces.items() if x}
        for row in chosen:
            together.load(row, states[row])
        together.run(chosen)
        states |= {row: together.take(row, start + len(x)) for row, (_, x) in chosen.items()}
    assert all(same(states[row], state) for row, state in expected.items())
    found, plain = (
        torch.cat([x.flatten() for x in tensors(state)]) for state in (expected[1], state_after(exact, 1, ids[1][:27]))
    )
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", FEW)
def test_sizes_of_passes_differ_by_rounding(case, device):
    """A pass takes the smallest size with its rows, and leaves rows beyond it as they are."""
    model = tiny_model(case).to(device)
    prompts = PromptRows(RowTable(model, [1]), [1, 4, 2], PIECE, padded=True)
    assert [prompts.best_count(waiting) for waiting in range(1, 7)] == [1, 2, 2, 4, 4, 4]
    assert [prompts.size_for(count) for count in range(1, 5)] == [1, 2, 4, 4]
    piece = tokens(1, PIECE)[0].tolist()
    for row in range(4):
        prompts.load(row, None)
    prompts.run({0: (0, piece), 1: (0, piece), 3: (0, piece)})
    widest = [prompts.take(row, PIECE) for row in (0, 1, 3)]
    assert same(widest[0], widest[1]) and same(widest[0], widest[2])
    for row in (0, 1):
        prompts.load(row, None)
        prompts.run({row: (0, piece)})
        torch.testing.assert_close(tensors(prompts.take(row, PIECE)), tensors(widest[0]), rtol=1e-4, atol=1e-5)
    assert same(prompts.take(3, PIECE), widest[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("kind", ["kda_without_conv", "hybrid", "qwen3_next"])
def test_other_rows_change_no_bit(kind, way, device):
    """Those of a model with experts neither."""
    model = model_of(kind).to(device)
    samplings = {Way.GREEDY: Sampling(), Way.DRAWN: Sampling(1.0), Way.FILTERED: Sampling(1.0, 20, 0.9)}
    table = RowTable(model, [8], MOST)
    prompts = PromptRows(table, [1], PIECE, padded=False)
    ids = tokens(8, 12).tolist()
    states = [state_after(prompts, 0, row) for row in ids]

    def run(rows):
        for row in rows:
            table.put(row, states[row], ids[row][-1], 11, samplings[way], row)
        table.step(8, Way.FILTERED if len(rows) > 1 else way)
        table.step(8, way)
        chances = table.read_log_probabilities(8, [2], 3)()
        assert [x.shape for x in chances] == [(1,), (1, 3), (1, 3)]
        return table.read_tokens(8)()[2].item(), [x.tolist() for x in chances]

    assert run([2]) == run(range(8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", [Way.GREEDY, Way.FILTERED])
@pytest.mark.parametrize("kind", ["hybrid", FAMILIES[0]])
def test_nan_stays_in_its_row_and_goes_with_it(kind, way, device):
    """A row whose prompt has a token of NaN makes none; others, and the next one in its place, make theirs."""
    model = model_of(kind).to(device)
    sampling = {Way.GREEDY: Sampling(), Way.DRAWN: Sampling(1.0), Way.FILTERED: Sampling(1.0, 20, 0.9)}[way]
    table = RowTable(model, [2], MOST)
    padded = kind != "qwen3_next"  # its experts wait for the device, which a padded pass must not
    prompts = PromptRows(table, [2], PIECE, padded=padded)
    ids = tokens(3, 20)

    def begin(row, ids):
        table.put(row, state_after(prompts, row, ids.tolist()), ids[-1].item(), len(ids) - 1, sampling, 7)

    def made(count=4):
        found = []
        for _ in range(count):
            table.step(2, way)
            chances = table.read_log_probabilities(2, [0, 1], 2)()[0]
            found.append((table.read_tokens(2)().tolist(), chances[1].item()))
        return found

    begin(0, ids[0, :9])
    begin(1, ids[1])
    expected = made()
    used = {*ids.flatten().tolist(), *(token for pair, _ in expected for token in pair)}
    ids[2, 5] = unused = next(token for token in range(61) if token not in used)
    model.get_input_embeddings().weight.data[unused] = float("nan")
    begin(0, ids[2])
    begin(1, ids[1])
    assert made() == [([-1, theirs], chance) for (_, theirs), chance in expected]
    begin(0, ids[0, :9])
    begin(1, ids[1])
    assert made() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*FEW, "hybrid"])
def test_widths_differ_by_rounding(case, device):
    model = tiny_model(case).to(device)
    table = RowTable(model, [1, 3, 16], MOST)
    prompts = PromptRows(table, [1], PIECE, padded=False)
    state, found = state_after(prompts, 0, tokens(1, 12)[0].tolist()), []
    for width in table.widths:
        table.put(0, state, 5, 11, Sampling(), 0)
        for _ in range(5):
            table.step(width, Way.GREEDY)
        found.append(table.read_log_probabilities(width, [0], 61)()[1])
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=1e-4)


def test_all_is_captured_beforehand(captures, monkeypatch):
    monkeypatch.setattr(row_table, "capture", step.capture)
    table = RowTable(tiny_model("hybrid"), [1, 2], MOST)
    table.capture()
    prompts = PromptRows(table, [1, 2, 4], PIECE, padded=True)
    prompts.capture()
    assert len(captures) == 2 + 2 * len(Way) + 3
    prompts.run({0: (0, [1, 2])})
    for way in Way:
        table.step(2, way)
    assert len(captures) == 2 + 2 * len(Way) + 3


def test_a_pass_that_waits_runs_without_padding(captures, monkeypatch, caplog):
    model = model_of("qwen3_next")
    table = RowTable(model, [2, 4], MOST)
    prompts = PromptRows(table, [1, 2], PIECE, padded=True)
    ids = tokens(1, 20)[0].tolist()
    expected = state_after(PromptRows(table, [1], PIECE, padded=False), 0, ids)
    forward = prompts._forward

    def waiting(rows, cache, length=None):
        states = forward(rows, cache, length)
        return states if rows.stop == 2 else states[torch.ones(1).nonzero()[0]]

    monkeypatch.setattr(prompts, "_forward", waiting)
    prompts.capture()
    assert len(captures) == 1 and not prompts.padded and not prompts._passes
    assert "prompts run one by one and without CUDA graphs, which makes them slower: nonzero" in caplog.text
    assert same(state_after(prompts, 0, ids), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FEW)
def test_taking_and_putting_states_waits_for_nothing(case):
    model = tiny_model(case).cuda()
    table = RowTable(model, [2])
    prompts = PromptRows(table, [2], PIECE, padded=True)
    table.capture()
    prompts.capture()
    torch.cuda.set_sync_debug_mode("error")
    try:
        prompts.load(0, None)
        prompts.run({0: (0, [1, 2, 3]), 1: (0, [4])})
        prompts.run({1: (0, [*range(PIECE)])})
        table.put(1, prompts.take(0, 3), 3, 4, Sampling(1.0), 2)
        table.move([1], [0])
        table.step(2, Way.FILTERED)
        reads = table.read_tokens(2), table.read_log_probabilities(2, [0], 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(reads[0]()) == 2 and len(reads[1]()) == 3


def test_rows_that_are_not_in_use_may_be_past_the_end():
    model = tiny_model("hybrid")
    table = RowTable(model, [2], 4)
    prompts = PromptRows(table, [1], PIECE, padded=False)
    state = state_after(prompts, 0, [3, 4])
    expected = None
    for _ in range(3):
        table.put(0, state, 4, 1, Sampling(), 0)
        made = continued(table, 0, 2, 3)
        assert expected in (None, made)
        expected = made


class TestRefusals:
    def test_softmax_layers_need_a_length(self):
        with pytest.raises(ValueError, match="max_length is needed"):
            RowTable(tiny_model("hybrid"), [1])

    def test_sliding_windows(self):
        model = swapped("mistral")
        with pytest.raises(ValueError, match="share no cache of softmax layers with sliding windows"):
            RowTable(model, [1], 10)

    def test_attention_without_masks(self):
        model = tiny_model("hybrid")
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(ValueError, match="'flash_attention_2' does not take: sdpa or eager does"):
            RowTable(model, [1], 10)
