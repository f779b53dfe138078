"""Captured training steps give the bits of eager ones; where they could not, the step runs eagerly and says why.

On a CPU a replay runs the blocks over the static tensors of the capture and writes where the last replay wrote, as a
CUDA graph does. Tests of real graphs are in test_captured_training_gpu.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_training import as_on_a_gpu, assert_same, reasons, replayed, train
from foreign_models import FUSED, foreign_model
from tiny_families import OWN, swapped
from tiny_models import tiny_model, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import deltazoo
from deltazoo.compat import accelerate, restore
from deltazoo.distributed import data_parallel, fully_shard_model
from deltazoo.layers.sequences import PackedSequences
from deltazoo.models.captured_training import conditions, graphs, kept

CASES = ["gated_deltanet", "kda", "hybrid", "tied", "micro_steps", "without_conv"]


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Two models alike in training mode: eager, captured."""
    models = make().train(), make().train()
    for model, option in zip(models, (False, "auto"), strict=True):
        if hasattr(model, "set_runtime"):
            model.set_runtime(captured_training=option)
    return models


def plain_batches(steps: int = 5, shape: tuple[int, int] = (2, 12)) -> list[dict[str, Tensor]]:
    rows = [tokens(*shape, seed=seed) for seed in range(steps)]
    return [{"input_ids": row, "labels": row} for row in rows]


def packed_batches(documents: list[int], length: int = 40) -> list[dict[str, Tensor]]:
    """Rows of that many documents each, of a few tokens and a long last one."""
    made = []
    for seed, count in enumerate(documents):
        row = tokens(1, length, seed=seed)
        bounds = torch.tensor([*[2 * i for i in range(count)], length], dtype=torch.int32)
        made.append({"input_ids": row, "labels": row, "cu_seqlens": bounds})
    return made


def padded_batches(steps: int = 5) -> list[dict[str, Tensor]]:
    made = []
    for step, batch_ in enumerate(plain_batches(steps)):
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[1, 5 + step :] = 0
        made.append({**batch_, "attention_mask": mask, "labels": batch_["labels"].masked_fill(mask == 0, -100)})
    return made


def assert_trains_alike(
    make: Callable[[], Any], data: list[dict[str, Tensor]], replays: int | None = None, **options: Any
) -> Any:
    eager, captured = both(make)
    assert_same(train(eager, data, **options), train(captured, data, **options))
    assert replayed(captured) == (len(data) - 2 if replays is None else replays), reasons(captured)
    return captured


# What is captured


@pytest.mark.parametrize("case", CASES)
def test_every_step_but_the_first_two_is_a_replay_of_the_same_bits(case):
    model = assert_trains_alike(lambda: tiny_model(case), plain_batches())
    assert "3 replayed from CUDA graphs, 2 eager" in reasons(model)
    assert "captured shapes: 2 x 12; they share 0.0 GiB" in reasons(model)


@pytest.mark.parametrize("level", deltazoo.runtime.RECOMPUTE_LEVELS)
def test_recompute_levels(level):
    assert_trains_alike(lambda: tiny_model("gated_deltanet", recompute=level), plain_batches())


def test_accumulated_gradients():
    assert_trains_alike(lambda: tiny_model("gated_deltanet"), plain_batches(8), accumulate=2)


def test_gradients_kept_in_place():
    def gradients(model: Any) -> list[Tensor]:
        for inputs in plain_batches():
            model.zero_grad(set_to_none=False)
            model(**inputs, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters()]

    eager, captured = both(lambda: tiny_model("gated_deltanet"))
    assert_same([tuple(gradients(eager))], [tuple(gradients(captured))])


@pytest.mark.parametrize("case", ["gated_deltanet", "hybrid"])
def test_padded_rows(case):
    assert_trains_alike(lambda: tiny_model(case), padded_batches())


@pytest.mark.parametrize("case", ["gated_deltanet", "hybrid"])
def test_packed_rows_of_about_as_many_documents_share_a_graph(case):
    assert_trains_alike(lambda: tiny_model(case), packed_batches([3, 8, 5, 2, 7]))
    assert_trains_alike(lambda: tiny_model(case), packed_batches([3, 9, 3, 9, 3, 9, 12]), replays=3)


@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_empty_sequences_at_the_end_change_nothing(count):
    bounds = torch.tensor([*range(count), 20], dtype=torch.int32)
    plain = PackedSequences.from_cu_seqlens(bounds, 20)
    padded = plain.padded()
    assert len(padded.cu_seqlens) - 1 == (8 if count <= 8 else 16)
    assert padded.beyond_one_row == plain.beyond_one_row == (count > 1)
    assert torch.equal(padded.positions, plain.positions)
    layer = deltazoo.layers.make_layer("gated_deltanet", hidden_size=32, num_heads=2, head_dim=8).double()
    x = torch.randn(1, 20, 32, dtype=torch.double)
    outputs, gradients = [], []
    for sequences in (plain, padded):
        y = layer(x, sequences=sequences)
        y = y[0] if isinstance(y, tuple) else y
        outputs.append(y)
        gradients.append(torch.autograd.grad(y.square().sum(), list(layer.parameters())))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_autocast_gives_the_same_bits_and_leaves_no_cast_weights_behind():
    assert_trains_alike(lambda: tiny_model("gated_deltanet"), plain_batches(), autocast="cpu")


def test_gradient_checkpointing():
    def make() -> Any:
        model = tiny_model("gated_deltanet")
        model.gradient_checkpointing_enable()
        return model

    model = assert_trains_alike(make, plain_batches())
    options = model.model.layers[0]._gradient_checkpointing_func.keywords
    assert "preserve_rng_state" not in options  # put back after the capture


def with_adapters(dropout: float, checkpointing: bool = False) -> Any:
    from peft import LoraConfig, get_peft_model

    model = tiny_model("gated_deltanet").train()
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model.set_runtime(captured_training="auto")
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj", "o_proj"]))


def eager_adapters(**options: Any) -> Any:
    model = with_adapters(**options)
    model.base_model.model.set_runtime(captured_training=False)
    return model


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_adapters_and_their_dropout(dropout):
    eager, captured = eager_adapters(dropout=dropout).train(), with_adapters(dropout=dropout).train()
    assert_same(train(eager, plain_batches()), train(captured, plain_batches()))
    assert replayed(captured) == 3
    with torch.no_grad():
        for p, q in zip(eager.parameters(), captured.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("level", ["checkpointing", "block", "nested"])
def test_dropout_that_would_be_drawn_again_runs_eagerly(level):
    options = {"dropout": 0.3, "checkpointing": level == "checkpointing"}
    eager, captured = eager_adapters(**options).train(), with_adapters(**options).train()
    if level != "checkpointing":
        for model in (eager, captured):
            model.base_model.model.set_runtime(recompute=level)
    assert_same(train(eager, plain_batches()), train(captured, plain_batches()))
    assert replayed(captured) == 0
    assert "would draw other random numbers" in reasons(captured)


def test_trained_embeddings_of_the_input():
    """As of prompt tuning: no weight of the blocks is trained."""

    def run(model: Any) -> list[tuple[Tensor, ...]]:
        model.requires_grad_(False)
        found = []
        for seed in range(4):
            x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            hidden = model.model(inputs_embeds=x, use_cache=False).last_hidden_state
            found.append((hidden, *torch.autograd.grad(hidden.square().sum(), [x])))
        return found

    eager, captured = both(lambda: tiny_model("gated_deltanet"))
    assert_same(run(eager), run(captured))
    assert replayed(captured) == 2


@pytest.mark.parametrize("family", sorted(OWN))
def test_swapped_models(family):
    eager, captured = both(lambda: swapped(family))
    assert_same(train(eager, plain_batches()), train(captured, plain_batches()))
    if family == "gpt2":  # its blocks take positional arguments
        assert "4 eager: the forward pass does more between its blocks" in reasons(captured)
    else:
        assert replayed(captured) == 2  # the first step watches the loop over the blocks


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_swapped_llama_on_all_kinds_of_batches(kind):
    data = {"plain": plain_batches, "padded": padded_batches, "packed": lambda: packed_batches([3, 4, 2, 5, 7, 8])}
    eager, captured = both(swapped)
    assert_same(train(eager, data[kind]()), train(captured, data[kind]()))
    assert replayed(captured) >= 2, reasons(captured)


@pytest.mark.parametrize("family", FUSED)
def test_accelerated_models(family):
    eager, captured = foreign_model(family).train(), foreign_model(family).train()
    accelerate(eager, captured_training=False)
    accelerate(captured)
    assert_same(train(eager, plain_batches()), train(captured, plain_batches()))
    if family == "glm5_next":  # its blocks hand on more than hidden states
        assert "does more between its blocks" in reasons(captured)
    else:
        assert replayed(captured) == 2  # the first step watches the loop over the blocks
    restore(captured)
    assert not any(module._forward_hooks for module in captured.modules())


# What leaves is a copy


def test_hidden_states_logits_and_gradients_of_early_steps_stay():
    def run(model: Any) -> list[tuple[Tensor, ...]]:
        found = []
        for inputs in plain_batches(6):
            model.zero_grad()
            output = model(**inputs, use_cache=False)
            output.loss.backward()
            found.append((output.loss, output.logits, *[p.grad for p in model.parameters()]))
        return found

    for fused in (True, False):
        eager, captured = both(lambda fused=fused: tiny_model("gated_deltanet", fuse_linear_cross_entropy=fused))
        assert_same(run(eager), run(captured))
        assert replayed(captured) == 4


def test_logits_read_after_the_next_step_are_those_of_their_own():
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    first, second = None, None
    for inputs in plain_batches(5):
        first, second = second, model(**inputs, use_cache=False)
        second.loss.backward()
    assert not torch.equal(first.logits, second.logits)
    expected = tiny_model("gated_deltanet").train()(**plain_batches(5)[3], use_cache=False).logits
    assert torch.equal(first.logits, expected)


# Backward passes of all kinds


def warm(model: Any, steps: int = 3) -> None:
    for inputs in plain_batches(steps):
        model(**inputs, use_cache=False).loss.backward()
    model.zero_grad()


def test_two_forward_passes_before_their_backward_passes():
    eager, captured = both(lambda: tiny_model("gated_deltanet"))
    found = []
    for model in (eager, captured):
        warm(model)
        first, second = [model(**inputs, use_cache=False).loss for inputs in plain_batches(5)[3:]]
        first.backward()
        second.backward()
        found.append((first, second, *[p.grad for p in model.parameters()]))
    assert_same(found[:1], found[1:])
    assert "an earlier forward pass is still to come" in reasons(captured)


def test_an_output_that_is_dropped_frees_the_graph():
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    warm(model)
    for inputs in plain_batches(2):
        model(**inputs, use_cache=False)
    assert replayed(model) == 3
    assert "still to come" not in reasons(model)


def test_a_second_backward_pass():
    eager, captured = both(lambda: tiny_model("gated_deltanet"))
    found = []
    for model in (eager, captured):
        warm(model)
        loss = model(**plain_batches(4)[3], use_cache=False).loss
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        loss.backward(retain_graph=True)
        loss.backward()
        found.append((*once, *[p.grad for p in model.parameters()]))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_same(found[:1], found[1:])
    assert replayed(captured) == 2


def test_a_second_backward_pass_draws_the_same_dropout():
    found = []
    for model in (eager_adapters(dropout=0.5).train(), with_adapters(dropout=0.5).train()):
        warm(model)
        torch.manual_seed(0)
        loss = model(**plain_batches(4)[3], use_cache=False).loss
        loss.backward(retain_graph=True)
        after = torch.rand(3)
        loss.backward()
        found.append((after, torch.rand(3), *[p.grad for p in model.parameters() if p.requires_grad]))
    assert_same(found[:1], found[1:])


def test_a_backward_pass_that_is_differentiated():
    found = []
    for model in both(lambda: tiny_model("gated_deltanet", backend="reference").double()):
        warm(model)
        parameters = list(model.parameters())
        loss = model(**plain_batches(4)[3], use_cache=False).loss
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        sum(g.square().sum() for g in gradients).backward()
        found.append((*gradients, *[p.grad for p in parameters]))
    for x, y in zip(*found, strict=True):  # parts of sums come in another order
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-9)


def test_hooks_of_parameters_run_once_per_step():
    counts = []
    for model in both(lambda: tiny_model("gated_deltanet")):
        calls: list[str] = []
        before = model.model.layers[0].attn.q_proj.weight
        before.register_hook(lambda d, calls=calls: calls.append("tensor"))
        before.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append("post"))
        warm(model, 4)
        later = model.model.layers[1].mlp.down_proj.weight
        later.register_hook(lambda d, calls=calls: calls.append("late"))
        warm(model, 2)
        counts.append(calls)
    assert counts[0] == counts[1]
    assert counts[0].count("tensor") == 6


def test_hooks_of_an_unused_parameter_do_not_run():
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    unused = nn.Parameter(torch.zeros(3))
    model.model.layers[0].register_parameter("unused", unused)
    ran = []
    unused.register_post_accumulate_grad_hook(ran.append)
    warm(model, 5)
    assert replayed(model) == 3
    assert unused.grad is None
    assert not ran


def test_weights_changed_before_the_backward_pass_are_an_error():
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    warm(model)
    loss = model(**plain_batches(1)[0], use_cache=False).loss
    with torch.no_grad():
        model.model.layers[0].attn.q_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Changes between steps


def changes() -> dict[str, Callable[[Any], None]]:
    def to_other_memory(model: Any) -> None:
        for p in model.parameters():
            p.data = p.data.clone()

    def transpose(model: Any) -> None:  # at its old address
        projections = [m for m in model.model.layers[0].modules() if isinstance(m, nn.Linear)]
        square = next(m for m in projections if m.in_features == m.out_features)
        square.weight.data = square.weight.data.t()

    def replace(model: Any) -> None:
        q = model.model.layers[0].attn.q_proj
        q.weight = nn.Parameter(2 * q.weight.detach())

    def replace_module(model: Any) -> None:
        old = model.model.layers[0].mlp.down_proj
        new = nn.Linear(old.in_features, old.out_features, bias=False)
        with torch.no_grad():
            new.weight.copy_(3 * old.weight)
        model.model.layers[0].mlp.down_proj = new

    def setting(model: Any) -> None:
        model.model.layers[1].mlp_norm.eps = 0.5

    def hook(model: Any) -> None:
        model.model.layers[1].register_forward_hook(lambda module, args, output: 2 * output)

    return {
        "memory": to_other_memory,
        "transposed": transpose,
        "parameter": replace,
        "frozen": lambda model: model.model.layers[0].requires_grad_(False),
        "module": replace_module,
        "setting": setting,
        "hook": hook,
        "dtype": lambda model: model.double(),
        "loaded": lambda model: model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}),
    }


@pytest.mark.parametrize("change", sorted(changes()))
def test_a_changed_model(change):
    eager, captured = both(lambda: tiny_model("gated_deltanet"))
    found = []
    for model in (eager, captured):
        before = train(model, plain_batches(4))
        changes()[change](model)
        found.append((before, train(model, plain_batches(8))))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])
    if change == "hook":
        assert replayed(captured) == 2
        assert "have changed" in reasons(captured) or "it has hooks" in reasons(captured)
    else:
        assert replayed(captured) > 2  # captured anew


def test_an_unknown_kind_of_module_runs_eagerly():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x)

    model = tiny_model("gated_deltanet", captured_training="auto").train()
    model.model.layers[0].mlp.down_proj.__class__ = Counting
    warm(model, 5)
    assert Counting.calls == 5
    assert "which may do more than a graph repeats" in reasons(model)


@pytest.mark.parametrize("one_group", [True, False])
def test_steps_under_fsdp2_are_captured_where_all_blocks_are_one_group(one_group, monkeypatch):
    """Parameters move in every step; a group of a block also runs hooks."""
    monkeypatch.setattr(data_parallel, "_ONE_GROUP", 2**29 if one_group else 0)
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        fully_shard_model(model, mesh=init_device_mesh("cpu", (1,)))
        warm(model, 5)
    finally:
        torch.distributed.destroy_process_group()
    assert replayed(model) == 3 * one_group
    assert ("FSDP" in reasons(model)) != one_group and "moved" not in reasons(model)


def test_adapters_switched_off_and_on():
    found = []
    for model in (eager_adapters(dropout=0.0).train(), with_adapters(dropout=0.0).train()):
        steps = train(model, plain_batches(4))
        with model.disable_adapter():
            loss = model(**plain_batches(1)[0], use_cache=False).loss
        found.append([*steps, (loss,), *train(model, plain_batches(4))])
    assert_same(*found)


# When to capture


def test_evaluation_and_passes_without_gradients_are_never_captured_nor_counted():
    model = tiny_model("gated_deltanet", captured_training="auto")
    for _ in range(5):
        model(**plain_batches(1)[0])
    model.train()
    with torch.no_grad():
        for _ in range(5):
            model(**plain_batches(1)[0])
    assert deltazoo.report(model).captured is None


def test_ever_new_shapes_are_never_captured():
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    for length in range(4, 20):
        model(**plain_batches(1, (1, length))[0], use_cache=False).loss.backward()
    assert replayed(model) == 0
    assert "16 eager: a shape is captured when it comes for the 3rd time" in reasons(model)


def test_at_most_eight_shapes():
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    for length in range(4, 14):
        for inputs in plain_batches(4, (1, length)):
            model(**inputs, use_cache=False).loss.backward()
    assert replayed(model) == 16
    assert "8 shapes are captured already" in reasons(model)


def test_interleaved_shapes():
    shapes = [(2, 12), (1, 20), (3, 4)] * 5
    data = [plain_batches(1, shape)[0] for shape in shapes]
    assert_trains_alike(lambda: tiny_model("gated_deltanet"), data, replays=9)


def test_large_batches_run_eagerly(monkeypatch):
    monkeypatch.setattr(conditions, "MOST_TOKENS", 20)
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    warm(model, 4)
    assert "more than 20 tokens keep the GPU busy anyway" in reasons(model)


def test_memory_that_runs_out_in_an_eager_step_frees_the_graphs(monkeypatch):
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    warm(model)
    expected = tiny_model("gated_deltanet").train()(**plain_batches(1, (3, 9))[0]).loss
    original, failed = kept._run, []

    def runs_out(calls: Any, x: Tensor) -> Tensor:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("no memory")
        return original(calls, x)

    monkeypatch.setattr(kept, "_run", runs_out)
    assert torch.equal(model(**plain_batches(1, (3, 9))[0]).loss, expected)
    warm(model, 4)
    assert replayed(model) == 1
    assert "the graphs were given up" in reasons(model)


def test_parameters_of_a_functional_call_get_their_gradients():
    found = []
    for model in both(lambda: tiny_model("gated_deltanet")):
        model.set_runtime(fuse_linear_cross_entropy=False)
        for inputs in plain_batches(5):
            others = {name: 2 * p for name, p in model.named_parameters()}
            output = torch.func.functional_call(model, others, kwargs={**inputs, "use_cache": False})
            found.append((output.loss, *torch.autograd.grad(output.loss, list(model.parameters()))))
    assert_same(found[:5], found[5:])


def test_what_watches_single_operations_makes_the_step_eager():
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    warm(model)
    inputs = plain_batches(1)[0]
    with torch.autograd.graph.save_on_cpu():
        model(**inputs, use_cache=False)
    assert "hooks on saved tensors" in reasons(model)
    with torch.autograd.detect_anomaly(check_nan=False):
        model(**inputs, use_cache=False)
    assert "anomaly detection" in reasons(model)
    output = model(**inputs, use_cache=False, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert "outputs of single layers" in reasons(model)
    model(**inputs, use_cache=True)
    assert "a cache is kept" in reasons(model)
    assert replayed(model) == 1


def test_outputs_of_layers_do_not_keep_later_steps_from_being_captured():
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    model(**plain_batches(1)[0], use_cache=False, output_hidden_states=True)
    warm(model, 5)
    assert replayed(model) == 3


def test_weights_that_are_moved_free_the_graphs():
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    warm(model, 4)
    model.to(torch.float64)
    assert deltazoo.report(model).captured is None


def test_switched_off():
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    warm(model, 4)
    assert replayed(model) == 2
    model.set_runtime(captured_training=False)
    warm(model, 4)
    assert deltazoo.report(model).captured is None
    with pytest.raises(ValueError, match="captured_training"):
        model.set_runtime(captured_training=True)


# Failures


@pytest.mark.parametrize("place", ["_rehearse", "_forward", "_backward"])
def test_a_failed_capture_leaves_everything_as_it_was(place, monkeypatch):
    eager, captured = both(lambda: tiny_model("gated_deltanet"))
    original = getattr(graphs.CapturedStack, place)

    def failing(self: Any, *args: Any) -> Any:
        original(self, *args)
        torch.rand(1)
        raise RuntimeError("no graph today")

    monkeypatch.setattr(graphs.CapturedStack, place, failing)
    registries = [dict(module._parameters) for module in captured.modules()]
    assert_same(train(eager, plain_batches(6)), train(captured, plain_batches(6)))
    for module, before in zip(captured.modules(), registries, strict=True):
        assert all(module._parameters[name] is p for name, p in before.items())
    assert replayed(captured) == 0
    assert "4 eager: the capture failed (RuntimeError: no graph today)" in reasons(captured)


def test_after_a_failed_capture_earlier_graphs_serve_and_no_more_are_made(monkeypatch):
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    warm(model, 4)
    original, calls = graphs.CapturedStack._backward, []

    def failing(self: Any) -> Any:
        calls.append(None)
        original(self)
        raise RuntimeError("no graph today")

    monkeypatch.setattr(graphs.CapturedStack, "_backward", failing)
    for length in (6, 7):
        for inputs in plain_batches(4, (1, length)):
            model(**inputs, use_cache=False).loss.backward()
    assert len(calls) == 1 and replayed(model) == 2
    monkeypatch.undo()
    as_on_a_gpu(monkeypatch)
    warm(model, 2)
    assert replayed(model) == 4
    assert "6 eager: the capture failed (RuntimeError: no graph today)" in reasons(model)


def test_blocks_that_could_not_be_captured_are_tried_again(monkeypatch):
    monkeypatch.setattr(kept, "_CALLS_UNTIL_NEXT_TRY", 3)
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: None)
    warm(model, 4)
    hook.remove()
    warm(model, 6)
    assert "it has hooks" in reasons(model)
    assert replayed(model) == 2


def test_a_block_that_changes_its_attributes_is_not_captured():
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    norm = model.model.layers[0].attn_norm
    original, norm.calls = type(norm).forward, 0

    class Counts(type(norm)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(self, *args, **kwargs)

    Counts.__module__ = "deltazoo.somewhere"
    norm.__class__ = Counts
    warm(model, 4)
    assert norm.calls == 4 + 2  # and those of the capture that was given up
    assert "a block changes its own attributes" in reasons(model)


def test_a_block_that_writes_to_its_buffers_is_not_captured():
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    norm = model.model.layers[0].attn_norm
    norm.register_buffer("calls", torch.zeros(1))
    original = type(norm).forward

    class Counts(type(norm)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls.add_(1)
            return original(self, *args, **kwargs)

    Counts.__module__ = "deltazoo.somewhere"
    norm.__class__ = Counts
    warm(model, 4)
    assert norm.calls == 4
    assert "writes to its buffers" in reasons(model)


# Copies of a model


def test_copies_and_pickles_start_without_graphs(tmp_path):
    model = tiny_model("gated_deltanet", captured_training="auto").train()
    warm(model, 4)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert replayed(other) == 0
        warm(other, 4)
        assert replayed(other) == 2
    model.save_pretrained(tmp_path)
    assert "captured" not in "".join(model.state_dict())
    loaded = type(model).from_pretrained(tmp_path, captured_training="auto").train()
    assert_same(train(loaded, plain_batches()), train(model, plain_batches()))
