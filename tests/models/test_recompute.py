"""Every recompute level gives the same gradients, and each keeps less than the one before it.

`python test_recompute.py FILE` is a child process, for Triton's interpreter must be chosen before Triton is imported.
"""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from fresh_process import run_interpreted
from tiny_models import tiny_model, tokens
from torch import nn
from torch.func import functional_call, grad, jvp
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

import deltazoo.layers.rule
from deltazoo.layers import recompute_levels
from deltazoo.models import block
from deltazoo.ops import DeltaRuleOutput
from deltazoo.ops.autograd_modes import scans_again
from deltazoo.ops.fused import glu, norms, short_conv
from deltazoo.runtime import RECOMPUTE_LEVELS as LEVELS

CASES = [
    "gated_deltanet",
    "kda",
    "efla",
    "longhorn",
    "micro_steps",
    "erase_only",
    "hybrid",
    "hybrid_kda",
    "without_conv",
]


def loss_and_gradients(model, ids, **kwargs):
    model.zero_grad()
    loss = model(ids, labels=ids, **kwargs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_same(case, level):
    ids = tokens(2, 70)
    expected = loss_and_gradients(tiny_model(case).train(), ids)
    actual = loss_and_gradients(tiny_model(case, recompute=level).train(), ids)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_which_levels_scan_again():
    seen = []

    def double(x):
        seen.append(scans_again())
        return 2 * x

    x = torch.ones(3, requires_grad=True)
    for level in LEVELS:
        recompute_levels.run_block(level, double, x)
    assert (LEVELS, seen) == (("none", "elementwise", "states", "block", "nested"), [False, False, True, False, False])
    assert not scans_again()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Make the CPU recompute by default, as a GPU does, small batches too."""
    monkeypatch.setattr(recompute_levels, "_recomputes_by_default", lambda device: True)
    monkeypatch.setattr(recompute_levels, "SMALL_BATCH", 0)


def levels_run(monkeypatch):
    """A list of the levels at which blocks run."""
    seen, run = [], block.run_block
    monkeypatch.setattr(block, "run_block", lambda level, *args, **kw: seen.append(level) or run(level, *args, **kw))
    return seen


def test_by_default_a_gpu_recomputes_states_and_a_cpu_nothing():
    devices = [torch.device(name) for name in ("cpu", "cuda", "meta")]
    assert [recompute_levels.level_of(None, device) for device in devices] == ["none", "states", "none"]
    assert [recompute_levels.level_of("block", device) for device in devices] == ["block"] * 3
    with torch.no_grad():
        assert recompute_levels.level_of(None, torch.device("cuda")) == "none"
    with torch.autograd.graph.save_on_cpu():  # and other hooks, such as those of others' activation checkpointing
        assert recompute_levels.level_of(None, torch.device("cuda")) == "none"


def test_small_batches_are_kept_whole_by_default(monkeypatch):
    cuda, limit = torch.device("cuda"), recompute_levels.SMALL_BATCH
    assert [recompute_levels.level_of(None, cuda, n) for n in (1, limit, limit + 1)] == ["none", "none", "states"]
    assert recompute_levels.level_of("elementwise", cuda, 1) == "elementwise"
    monkeypatch.setattr(recompute_levels, "_recomputes_by_default", lambda device: True)
    monkeypatch.setattr(recompute_levels, "SMALL_BATCH", 40 * tiny_model("hybrid").config.hidden_size)
    model, seen = tiny_model("hybrid").train(), levels_run(monkeypatch)
    for rows in (2, 3):
        assert model(tokens(rows, 20)).past_key_values is None
    assert seen == ["none"] * 2 + ["states"] * 2
    most = limit // model.config.hidden_size
    assert f"states, none in batches of up to {most:,} tokens (default on" in model.model.describe_training()


def test_compiled_code_does_not_ask_for_the_size(monkeypatch):
    """It recomputes at any, and a condition on a symbolic one would compile it twice."""
    monkeypatch.setattr(recompute_levels, "_recomputes_by_default", lambda device: True)
    monkeypatch.setattr(recompute_levels, "SMALL_BATCH", 200)
    compiled = []

    def scaled(x):
        return x * (2 if recompute_levels.level_of(None, x.device, x.numel()) == "states" else 3)

    run = torch.compile(scaled, backend=lambda program, _: compiled.append(program) or program, dynamic=True)
    assert [run(torch.ones(rows, 10)).max() for rows in (5, 30)] == [2, 2] and len(compiled) == 1


def test_the_default_on_a_gpu(on_a_gpu, monkeypatch):
    ids, seen = tokens(2, 20), levels_run(monkeypatch)
    expected = loss_and_gradients(tiny_model("hybrid", recompute="none").train(), ids)
    model = tiny_model("hybrid").train()
    seen.clear()
    torch.testing.assert_close(loss_and_gradients(model, ids), expected, rtol=0, atol=0)
    assert seen == ["states"] * 2
    seen.clear()
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values.get_seq_length() == 20  # asked for, so nothing is recomputed
    assert model.eval()(ids).past_key_values.get_seq_length() == 20
    assert seen == ["states"] * 2 + ["none"] * 4
    with torch.no_grad():
        assert model.train()(ids).past_key_values.get_seq_length() == 20


def test_generation_in_training_mode_keeps_its_cache(on_a_gpu):
    ids = tokens(1, 5)
    options = {"max_new_tokens": 4, "do_sample": False}
    found = [tiny_model("hybrid").train(mode).generate(ids, **options) for mode in (True, False)]
    assert torch.equal(*found)


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("case", ["gated_deltanet", "hybrid"])
def test_under_autocast(case, level):
    ids = tokens(2, 70)
    results = []
    for model in (tiny_model(case).train(), tiny_model(case, recompute=level).train()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_adapters_and_linear_modules_of_others():
    """Most weights frozen, one map with LoRA, one that changes its input: saved tensors are views of all kinds."""

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = nn.Parameter(torch.randn(4, base.in_features) / 8)
            self.up = nn.Parameter(torch.randn(base.out_features, 4) / 8)

        def forward(self, x):
            return self.base(x) + (x.transpose(1, 2).contiguous().transpose(1, 2) @ self.down.T) @ self.up.T

    ids, results = tokens(2, 20), []
    for level in ("none", "elementwise"):
        model = tiny_model("hybrid", recompute=level).train().requires_grad_(False)
        for layer in model.model.layers:
            torch.manual_seed(2)
            layer.attn.q_proj, layer.mlp.down_proj = Adapted(layer.attn.q_proj), Adapted(layer.mlp.down_proj)
        model(ids, labels=ids).loss.backward()
        results.append({name: x.grad for name, x in model.named_parameters() if x.requires_grad})
    assert len(results[0]) == 8
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_dropout_is_drawn_again_as_it_was(level):
    """That of an adapter, as a module around a map; the random numbers of the next step are the same, too."""
    ids, results = tokens(2, 20), []
    for one in ("none", level):
        model = tiny_model("hybrid", recompute=one).train()
        for layer in model.model.layers:
            layer.attn.q_proj = nn.Sequential(nn.Dropout(0.5), layer.attn.q_proj)
            layer.mlp.down_proj = nn.Sequential(nn.Dropout(0.5), layer.mlp.down_proj)
        torch.manual_seed(3)
        results.append([*loss_and_gradients(model, ids), torch.rand(3)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_what_hooks_on_modules_see_does_not_change():
    def remember(outputs, name, module, inputs, output):
        outputs[name] = output

    ids, seen = tokens(2, 20), []
    for level in ("none", "elementwise"):
        model, outputs = tiny_model("gated_deltanet", recompute=level).train(), {}
        for name, module in model.named_modules():
            module.register_forward_hook(partial(remember, outputs, name))
        loss = model(ids, labels=ids).loss
        seen.append({name: x.detach().clone() for name, x in outputs.items() if isinstance(x, torch.Tensor)})
        gradient = torch.autograd.grad(loss, outputs["model.layers.0.mlp"])[0]
        seen[-1]["gradient"] = gradient
    assert "model.layers.1.attn_norm" in seen[0]
    torch.testing.assert_close(*seen, rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_packed_documents_and_padding(level):
    for shape, kwargs in [
        ((1, 30), {"cu_seqlens": torch.tensor([0, 7, 8, 30])}),
        ((2, 9), {"attention_mask": torch.tensor([[1] * 9, [0] * 4 + [1] * 5])}),
    ]:
        expected = loss_and_gradients(tiny_model("gated_deltanet").train(), tokens(*shape), **kwargs)
        model = tiny_model("gated_deltanet", recompute=level).train()
        torch.testing.assert_close(loss_and_gradients(model, tokens(*shape), **kwargs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_with_gradient_checkpointing(level, reentrant):
    ids = tokens(2, 20)
    expected = loss_and_gradients(tiny_model("hybrid").train(), ids)
    model = tiny_model("hybrid", recompute=level).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.testing.assert_close(loss_and_gradients(model, ids), expected, rtol=0, atol=0)


def kept_bytes(level, layers, gradient_checkpointing=False, case="gated_deltanet", **options):
    """What a forward pass in training leaves allocated for the backward pass, bytes per token."""
    ids = tokens(2, 256)
    # 512 tokens: what is kept per sequence and not per token hardly counts.
    options = {"hidden_size": 64, **options}
    model = tiny_model(case, recompute=level, num_hidden_layers=layers, **options).train()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model(ids, labels=ids, use_cache=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss = model(ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in recorded.key_averages()) / ids.numel()


def kept_per_layer(level, **options):
    return (kept_bytes(level, 3, **options) - kept_bytes(level, 1, **options)) / 2


def test_each_level_keeps_less():
    """A block keeps its input, 64 numbers a token, and some state per sequence; `none` keeps a hundred times that."""
    kept = {level: kept_per_layer(level) for level in LEVELS}
    assert kept["elementwise"] < 0.6 * kept["none"]
    assert kept["states"] == kept["elementwise"]  # here, where the operator keeps no states
    assert kept["block"] < 0.2 * kept["elementwise"]
    assert kept["nested"] == kept["block"] + torch.get_rng_state().nbytes / 512  # the random state, twice
    assert kept_per_layer("none", gradient_checkpointing=True) <= kept["block"] * 1.1


@pytest.mark.parametrize("case", ["gated_deltanet", "hybrid"])
def test_a_nested_block_holds_its_layer_or_its_mlp(case):
    """The input of a layer's last map, which that keeps, is there or not while the backward pass of an MLP runs."""
    held = {}
    for level in ("block", "nested"):
        model, mixed, alive = tiny_model(case, recompute=level).train(), [], []

        def remember(module, inputs, mixed=mixed):
            mixed.append(StorageWeakRef(inputs[0].untyped_storage()))

        def look(gradient, mixed=mixed, alive=alive):
            alive.append(sum(not storage.expired() for storage in mixed))

        def look_later(module, inputs, look=look):
            inputs[0].register_hook(look)

        for layer in model.model.layers:
            layer.attn.o_proj.register_forward_pre_hook(remember)
            layer.mlp.down_proj.register_forward_pre_hook(look_later)
        model(tokens(2, 70), labels=tokens(2, 70)).loss.backward()
        held[level] = alive
    assert held == {"block": [1, 1], "nested": [0, 0]}


def test_copies_made_for_autocast_are_not_kept():
    with torch.autocast("cpu", torch.bfloat16):
        kept = {level: kept_per_layer(level) for level in LEVELS[:2]}
    assert kept["elementwise"] < 0.5 * kept["none"]


def saving_its_inputs(shapes_like):
    """A function that keeps its inputs and nothing else, as the kernels do; its results look like some of them."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            results = tuple(torch.ones_like(tensors[place]) for place in shapes_like)
            return results if len(results) > 1 else results[0]

        @staticmethod
        def backward(ctx, *gradients):
            return tuple(torch.ones_like(x) for x in ctx.saved_tensors)

    return Function.apply


def test_what_is_kept_around_kernels(monkeypatch):
    """Matrix products, the rule's output and the block's input: 5 + 2 * 2.75 numbers of 20.25 per token and channel."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that kernels, which are stand-ins here, pass for a CPU
    like_first, like_third = saving_its_inputs([0]), saving_its_inputs([2])
    layers = deltazoo.layers

    def added(x, residual):
        """The kernel keeps the sum in place of both."""
        total = x + residual
        return like_first(total), total

    monkeypatch.setattr(norms, "_rms_operator", lambda x, weight, *_: like_first(x, weight))
    monkeypatch.setattr(norms, "_add_rms_operator", lambda x, residual, *_: added(x, residual))
    monkeypatch.setattr(glu, "_swiglu_operator", like_first)
    monkeypatch.setattr(glu, "trained_weights", lambda *linears: [])  # as of an adapted map, so that a product is kept

    like_three = saving_its_inputs([0, 1, 2])
    monkeypatch.setattr(short_conv, "short_convs", lambda *arguments: like_three(*arguments[:6]))
    monkeypatch.setattr(short_conv, "takes_kernel", lambda fused, *_, **__: fused)

    def rule(q, k, v, beta, *_, **__):
        return DeltaRuleOutput(like_third(q, k, v, beta), None)

    monkeypatch.setattr(layers.rule, "delta_rule", rule)
    sizes = {"hidden_size": 64, "num_heads": 2, "head_dim": 32, "intermediate_size": 176}
    options = {"fused_kernels": True, "fuse_linear_cross_entropy": False, **sizes}
    kept = {level: kept_per_layer(level, case="delta_net", **options) for level in LEVELS[:2]}
    number = 4 * 64
    # The step size and its gate are small; the profiler counts a few bytes per tensor.
    assert kept["none"] == pytest.approx(20.25 * number, rel=0.05)
    assert kept["elementwise"] == pytest.approx(11.5 * number, rel=0.05)


def test_evaluation_and_caches_keep_their_own_way():
    model = tiny_model("hybrid", recompute="elementwise")
    plain, ids = tiny_model("hybrid"), tokens(1, 8)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=0)
    for one in (model, plain):
        one.cache = one(ids[:, :5], use_cache=True).past_key_values
        one.train()
    logits = [one(ids[:, 5:], past_key_values=one.cache, use_cache=True).logits for one in (model, plain)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)
    assert model.cache.get_seq_length() == 8
    assert model(ids).past_key_values is None


@pytest.mark.slow
def test_compiles_in_one_graph():
    torch._dynamo.reset()
    ids, model = tokens(2, 20), tiny_model("gated_deltanet", recompute="elementwise").train()
    expected = loss_and_gradients(model, ids)
    expected = expected[0], {name: grad.clone() for name, grad in expected[1].items()}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    loss = compiled(ids, labels=ids).loss
    loss.backward()
    actual = loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(actual, expected)
    torch._dynamo.reset()


def remember_results(outputs, module, inputs, results):
    outputs.extend(results if isinstance(results, tuple) else [results])


def interpreted_gradients():
    """Gradients of models with fused kernels at two levels, in this process's interpreter."""
    ids, kwargs = tokens(1, 12), {"cu_seqlens": torch.tensor([0, 5, 12])}
    for level in LEVELS[:2]:
        model = tiny_model("hybrid", recompute=level, fused_kernels=True, backend="chunkwise").train()
        _, gradients = loss_and_gradients(model, ids, **kwargs)
        yield f"packed {level}", gradients
    for level in LEVELS[:2]:
        model = tiny_model("gated_deltanet", recompute=level, fused_kernels=True, backend="chunkwise").train()
        outputs = []
        for norm in (model.model.layers[0].attn_norm, model.model.layers[0].mlp_norm, model.model.norm):
            norm.register_forward_hook(partial(remember_results, outputs))
        with torch.autocast("cpu", torch.bfloat16):
            _, gradients = loss_and_gradients(model, ids)
        written = [y.dtype for y in outputs]
        # The norms that feed linear maps write what those would cast to; the residual stream and the end stay.
        assert written == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32], written
        yield f"autocast {level}", gradients


def test_gradients_through_fused_kernels_are_the_same(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "gradients.pt"
    run_interpreted(Path(__file__), path)
    gradients = torch.load(path)
    assert len(gradients) == 4
    for case in ("packed", "autocast"):
        torch.testing.assert_close(gradients[f"{case} elementwise"], gradients[f"{case} none"], rtol=0, atol=0)


if __name__ == "__main__":
    torch.save(dict(interpreted_gradients()), sys.argv[1])


@pytest.mark.parametrize("level", LEVELS)
def test_transforms_and_second_derivatives(level):
    """Forward mode and torch.func see through every level; a Hessian times a vector, in two ways."""
    ids = tokens(2, 20)
    model = tiny_model("kda", recompute=level).double().train()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    toward = {name: torch.randn_like(value) for name, value in parameters.items()}

    def loss(parameters):
        return functional_call(model, parameters, (ids,), {"labels": ids}).loss

    def along(gradients):
        return sum((gradients[name] * x).sum() for name, x in toward.items())

    tangent = jvp(loss, (parameters,), (toward,))[1]
    assert tangent.item() == pytest.approx(along(grad(loss)(parameters)).item(), rel=1e-5)
    forward_over_reverse = jvp(grad(loss), (parameters,), (toward,))[1]
    leaves = list(model.parameters())
    gradients = torch.autograd.grad(model(ids, labels=ids).loss, leaves, create_graph=True)
    twice = torch.autograd.grad(along(dict(zip(parameters, gradients, strict=True))), leaves)
    torch.testing.assert_close(dict(zip(parameters, twice, strict=True)), forward_over_reverse, rtol=1e-5, atol=1e-5)
