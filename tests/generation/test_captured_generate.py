"""`model.generate(capture_step=True)`: the outputs of plain `generate`, whatever the way of decoding.

On a CPU the steps run over the fixed tensors that a CUDA graph would use, without the graph.
"""

import accelerate
import pytest
import torch
from tiny_models import FEW, OPTIONS, tiny_model, tokens
from transformers import DynamicCache, StaticCache

from deltazoo.models.step_capture import FixedTensors, captured_steps

WAYS = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 20},
    "beam": {"do_sample": False, "num_beams": 3},
    "beam_sample": {"do_sample": True, "num_beams": 2},
    "samples_returned": {"do_sample": True, "num_return_sequences": 2},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def generate(model, ids, **options):
    torch.manual_seed(3)
    return model.generate(ids, max_new_tokens=8, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", FEW)
def test_equals_plain_generate(case, way, device):
    model, ids = tiny_model(case).to(device), tokens(2, 6).to(device)
    expected = generate(model, ids, **WAYS[way])
    assert torch.equal(generate(model, ids, capture_step=True, **WAYS[way]), expected)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("case", [case for case in OPTIONS if case not in FEW])
def test_greedy_for_every_other_model(case):
    model, ids = tiny_model(case), tokens(2, 6)
    assert torch.equal(generate(model, ids, capture_step=True, do_sample=False), generate(model, ids, do_sample=False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", FEW)
def test_left_padded(case, device):
    model, ids = tiny_model(case).to(device), tokens(2, 6).to(device)
    mask = torch.tensor([[1] * 6, [0] * 4 + [1] * 2], device=device)
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(generate(model, ids, capture_step=True, **options), generate(model, ids, **options))


@pytest.mark.parametrize("case", FEW)
def test_one_step_is_captured_and_the_rest_is_replayed(case, monkeypatch):
    from deltazoo.models import step_capture

    captures, steps = [], []

    def counting(step, changed):
        captures.append(len(changed))
        return lambda: (steps.append(1), step())

    monkeypatch.setattr(step_capture, "capture", counting)
    generate(tiny_model(case), tokens(2, 6), capture_step=True, do_sample=False, eos_token_id=-1)
    assert len(captures) == 1 and len(steps) == 7  # the first of eight tokens comes from the prompt


def test_moved_rows_return_to_their_addresses():
    model, ids = tiny_model("hybrid"), tokens(3, 5)
    cache = StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    fixed, keys = FixedTensors(cache), cache.layers[1].keys
    addresses = [x.data_ptr() for x in fixed.changed]
    before = [x.clone() for x in (cache.layers[0].recurrent_states[0], keys)]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert cache.layers[1].keys is not keys
    fixed.put_back()
    assert cache.layers[1].keys is keys
    assert [x.data_ptr() for x in fixed.changed] == addresses
    for now, then in zip((cache.layers[0].recurrent_states[0], keys), before, strict=True):
        assert torch.equal(now, then[[2, 0, 0]])


def test_a_forward_pass_that_was_replaced_is_given_back():
    """accelerate's hooks, for one, live in the model's own `forward`."""
    model, ids = tiny_model("hybrid"), tokens(1, 5)
    expected = generate(model, ids, do_sample=False)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    hooked = vars(model)["forward"]
    assert torch.equal(generate(model, ids, capture_step=True, do_sample=False), expected)
    assert vars(model)["forward"] is hooked


def test_the_forward_pass_is_given_back_after_an_error():
    model = tiny_model("gated_deltanet")
    with pytest.raises(KeyError), captured_steps(model):
        raise KeyError("the caller's own")
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"past_key_values": DynamicCache()}, "StaticCache, got DynamicCache"),
        ({"cache_implementation": "dynamic"}, "cache_implementation='static', got 'dynamic'"),
        ({"use_cache": False}, "use_cache=True, got False"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "logits alone, got output_hidden_states"),
    ],
)
def test_what_it_cannot_do_is_refused(options, message):
    model = tiny_model("gated_deltanet")
    with pytest.raises(ValueError, match=message):
        generate(model, tokens(1, 4), capture_step=True, do_sample=False, **options)
