"""A table of rows: prompts in pieces and steps of several widths give the tokens of `generate`, rows apart from each
other to the last bit."""

import pytest
import torch
from tiny_models import CASES, tiny_config, tiny_model, tokens

import deltazoo
from deltazoo.generation import Sampling, row_table, step_capture
from deltazoo.generation.row_sampling import Way
from deltazoo.generation.row_table import PromptRows, RowTable

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LINEAR = [case for case in CASES if "full_attention" not in tiny_config(case).layer_types]
FEW = ["gated_deltanet", "kda_without_conv"]
PIECE = 8


def state_after(prompts, row, ids):
    """The state of a prompt without its last token, run alone."""
    prompts.load(row, None)
    for start in range(0, len(ids) - 1, PIECE):
        prompts.run({row: (start, ids[start : min(start + PIECE, len(ids) - 1)])})
    return prompts.take(row, len(ids) - 1)


def continued(table, row, width, count, way=Way.GREEDY):
    made = []
    for _ in range(count):
        table.step(width, way)
        made.append(table.read_tokens(width)()[row].item())
    return made


def equal(a, b):
    pairs = zip(a.layers, b.layers, strict=True)
    return all(x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x) for x, y in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", LINEAR)
def test_greedy(case, padded, device):
    model = tiny_model(case).to(device)
    table = RowTable(model, [1, 4])
    prompts = PromptRows(model, 2, PIECE, table.empty, padded=padded)
    ids = tokens(1, 20).to(device)
    expected = deltazoo.generate(model, ids, max_new_tokens=8)[0, 20:].tolist()
    state = state_after(prompts, 1, ids[0].tolist())
    table.put(3, state, ids[0, -1].item(), 19, Sampling(), 0)
    assert continued(table, 3, 4, 4) == expected[:4]
    table.move([3], [0])
    assert continued(table, 0, 1, 4) == expected[4:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", FEW)
def test_a_padded_pass_keeps_rows_apart(case, device):
    """Other rows change no bit, an idle row keeps its state, and padding differs from none by rounding."""
    model = tiny_model(case).to(device)
    empty = RowTable(model, [1]).empty
    alone, together = (PromptRows(model, 3, PIECE, empty, padded=True) for _ in range(2))
    exact = PromptRows(model, 3, PIECE, empty, padded=False)
    ids = tokens(3, 30).tolist()
    expected = {row: state_after(alone, row, ids[row][:length]) for row, length in ((0, 6), (1, 27), (2, 18))}
    for start in range(0, 26, PIECE):
        ends = {0: 5, 1: 26, 2: 17}
        together.run(
            {row: (start, ids[row][start : min(start + PIECE, end)]) for row, end in ends.items() if start < end}
        )
    for row, state in expected.items():
        assert equal(together.take(row, 0), state)
    plain = state_after(exact, 1, ids[1][:27])
    for padded_layer, layer in zip(expected[1].layers, plain.layers, strict=True):
        for name, x in layer.items():
            torch.testing.assert_close(padded_layer[name], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("case", FEW)
def test_other_rows_change_no_bit(case, way, device):
    model = tiny_model(case).to(device)
    samplings = {Way.GREEDY: Sampling(), Way.DRAWN: Sampling(1.0), Way.FILTERED: Sampling(1.0, 20, 0.9)}
    table = RowTable(model, [4])
    prompts = PromptRows(model, 1, PIECE, table.empty, padded=False)
    ids = tokens(4, 12).tolist()
    states = [state_after(prompts, 0, row) for row in ids]

    def run(rows):
        for row in rows:
            table.put(row, states[row], ids[row][-1], 11, samplings[way], row)
        table.step(4, Way.FILTERED if len(rows) > 1 else way)
        table.step(4, way)
        chances = table.read_log_probabilities(4, [2], 3)()
        return table.read_tokens(4)()[2].item(), [x.tolist() for x in chances]

    assert run([2]) == run([0, 1, 2, 3])


@pytest.mark.parametrize("case", FEW)
def test_nothing_waits_for_the_device(case, captures, monkeypatch):
    """What is captured holds no operation that a CUDA graph could not."""
    monkeypatch.setattr(row_table, "capture", step_capture.capture)
    model = tiny_model(case)
    table = RowTable(model, [1, 2])
    prompts = PromptRows(model, 2, PIECE, table.empty, padded=True)
    table.capture()
    prompts.capture()
    assert len(captures) == 2 + 2 * len(Way) + 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", FEW)
def test_taking_and_putting_states_waits_for_nothing(case):
    model = tiny_model(case).cuda()
    table = RowTable(model, [2])
    prompts = PromptRows(model, 2, PIECE, table.empty, padded=True)
    table.capture()
    prompts.capture()
    torch.cuda.set_sync_debug_mode("error")
    try:
        prompts.load(0, None)
        prompts.run({0: (0, [1, 2, 3]), 1: (0, [4])})
        table.put(1, prompts.take(0, 3), 3, 4, Sampling(1.0), 2)
        table.move([1], [0])
        table.step(2, Way.FILTERED)
        reads = table.read_tokens(2), table.read_log_probabilities(2, [0], 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(reads[0]()) == 2 and len(reads[1]()) == 3


def test_models_with_softmax_layers_are_refused():
    with pytest.raises(ValueError, match="softmax"):
        RowTable(tiny_model("hybrid"), [1])
