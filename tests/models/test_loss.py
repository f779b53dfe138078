"""`fuse_linear_cross_entropy`: loss and gradients equal those from all logits, which are not kept."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch import nn

from deltazoo.models.loss import OutputWithLateLogits
from deltazoo.ops.fused import loss as pieces
from deltazoo.runtime import RECOMPUTE_LEVELS as LEVELS


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "_LOGITS_AT_ONCE", 61 * 7)


def pair(case, fused=True, **overrides):
    """Two models in training with the same weights: with the loss of all logits, and with the one without."""
    return tuple(tiny_model(case, fuse_linear_cross_entropy=on, **overrides).train() for on in (False, fused))


def loss_and_gradients(model, ids, **kwargs):
    model.zero_grad()
    output = model(ids, **{"labels": ids, **kwargs})
    output.loss.backward()
    assert isinstance(output, OutputWithLateLogits) == (model.runtime.fuse_linear_cross_entropy is not False)
    return {"loss": output.loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


def assert_equal(models, ids, **kwargs):
    """Equal up to the order in which float32 sums over pieces."""
    exact = loss_and_gradients(copy.deepcopy(models[0]).double(), ids, **kwargs)
    expected, actual = (loss_and_gradients(model, ids, **kwargs) for model in models)
    for name, x in expected.items():
        rounding = (x.double() - exact[name]).abs().max().item()  # of the loss from all logits
        atol = max(1e-5 * x.abs().max().item(), 4 * rounding)
        torch.testing.assert_close(actual[name], x, rtol=1e-5, atol=atol, msg=name)


@pytest.mark.parametrize("case", ["gated_deltanet", "kda", "tied", "hybrid"])
def test_same_loss_and_gradients(case):
    assert_equal(pair(case), tokens(2, 20))


IGNORING = tokens(2, 20).masked_fill(torch.arange(20) % 3 == 0, -100)


@pytest.mark.parametrize(
    ("shape", "kwargs"),
    [
        ((2, 20), {"labels": IGNORING}),
        ((2, 20), {"labels": IGNORING, "num_items_in_batch": 17}),
        ((2, 20), {"labels": IGNORING, "num_items_in_batch": torch.tensor(17)}),
        ((2, 20), {"shift_labels": IGNORING}),
        ((2, 20), {"labels": None, "shift_labels": IGNORING}),
        ((1, 30), {"labels": None, "shift_labels": tokens(1, 30), "cu_seqlens": torch.tensor([0, 7, 8, 30])}),
        ((2, 20), {"labels": IGNORING[:, -5:], "logits_to_keep": 5}),
        ((2, 20), {"labels": IGNORING[:, [3, 4, 9]], "logits_to_keep": torch.tensor([3, 4, 9])}),
        ((2, 20), {"labels": IGNORING.flatten()[:30], "logits_to_keep": (torch.arange(40) < 30).view(2, 20)}),
        ((1, 30), {"cu_seqlens": torch.tensor([0, 7, 8, 30])}),
        ((1, 9), {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])}),
        ((2, 9), {"attention_mask": torch.tensor([[1] * 9, [0] * 4 + [1] * 5])}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_labels_of_every_kind(shape, kwargs):
    assert_equal(pair("gated_deltanet"), tokens(*shape), **kwargs)


def test_no_label_that_counts():
    for model in pair("gated_deltanet"):
        assert model(tokens(1, 5), labels=torch.full((1, 5), -100)).loss.isnan()
        assert model(tokens(1, 5), labels=torch.full((1, 5), -100), num_items_in_batch=3).loss == 0


@pytest.mark.parametrize("level", LEVELS)
def test_with_recomputation(level):
    assert_equal(pair("hybrid", recompute=level), tokens(2, 20))


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_gradient_checkpointing(reentrant):
    models = pair("gated_deltanet")
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_equal(models, tokens(2, 20))


def test_under_autocast():
    """Both round equally often, but different numbers: errors at most double those from all logits."""
    ids = tokens(2, 20)
    exact = loss_and_gradients(tiny_model("gated_deltanet").train(), ids)
    with torch.autocast("cpu", torch.bfloat16):
        plain, actual = (loss_and_gradients(model, ids) for model in pair("gated_deltanet"))
    for name, x in exact.items():
        error, plain_error = ((found[name] - x).norm() / x.norm() for found in (actual, plain))
        assert error <= 2 * plain_error + torch.finfo(torch.float32).eps, f"{name}: {error:.2e} for {plain_error:.2e}"


def test_evaluation_and_calls_without_labels_return_logits():
    ids = tokens(2, 9)
    plain, fused = pair("gated_deltanet")
    torch.testing.assert_close(fused(ids).logits, plain(ids).logits, rtol=0, atol=0)
    expected, actual = (model.eval()(ids, labels=ids) for model in (plain, fused))
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=0)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=0, atol=0)


class Adapted(nn.Linear):
    """A replacement of the head by another library."""


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda m: setattr(m, "loss_function", lambda logits, **_: logits.sum()), "loss_function is <function"),
            (lambda m: setattr(m, "lm_head", Adapted(32, 61, bias=False)), r"lm_head is of <class '.*Adapted'>"),
            (lambda m: setattr(m, "lm_head", nn.Linear(32, 61)), "lm_head has a bias"),
            (lambda m: m.lm_head.register_forward_hook(lambda module, inputs, y: 2 * y), "lm_head has hooks"),
            (lambda m: m.lm_head.register_full_backward_hook(lambda *_: None), "lm_head has hooks"),
        ],
        ids=["own_loss", "another_head", "bias", "hook", "backward_hook"],
    )
    def test_what_needs_all_logits(self, change, message):
        _, model = pair("gated_deltanet")
        change(model)
        with pytest.raises(ValueError, match=rf"{message}.*call model.set_runtime\(fuse_linear_cross_entropy=False\)"):
            model(tokens(1, 9), labels=tokens(1, 9))
        assert model(tokens(1, 9)).logits is not None

    def test_a_head_with_a_forward_of_its_own(self):
        _, model = pair("gated_deltanet")
        model.lm_head.forward = lambda x: x
        with pytest.raises(ValueError, match="lm_head has hooks"):
            model(tokens(1, 9), labels=tokens(1, 9))

    def test_labels_that_do_not_fit(self):
        _, model = pair("gated_deltanet")
        with pytest.raises(
            ValueError, match=r"labels must have shape \(2, 5\), one for each position that gets logits"
        ):
            model(tokens(2, 9), labels=tokens(2, 9), logits_to_keep=5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_another_shape_are_refused_though_there_are_as_many(name, training):
    for model in pair("gated_deltanet"):
        for labels in (tokens(2, 9).T, tokens(2, 9).flatten(), tokens(3, 6)):
            with pytest.raises(ValueError, match=r"labels must have shape \(2, 9\), one for each .* got \("):
                model.train(training)(tokens(2, 9), **{name: labels})


def test_a_negative_number_of_logits_is_refused():
    with pytest.raises(ValueError, match="logits_to_keep must be at least 0, which keeps all, or positions, got -2"):
        pair("gated_deltanet")[0](tokens(2, 9), logits_to_keep=-2)


def test_lora_on_the_head_is_refused_and_elsewhere_trains():
    peft = pytest.importorskip("peft")
    for target, trains in (("q_proj", True), ("lm_head", False)):
        _, model = pair("gated_deltanet")
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=[target], r=2)).train()
        if trains:
            adapted(input_ids=tokens(1, 9), labels=tokens(1, 9)).loss.backward()
            assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
        else:
            with pytest.raises(ValueError, match=r"lm_head is of <class 'peft\..*Linear'>"):
                adapted(input_ids=tokens(1, 9), labels=tokens(1, 9))


@pytest.mark.slow
def test_compiles_in_one_graph():
    """Compiled code cannot compute logits later, so its output has none."""
    torch._dynamo.reset()
    ids, model = tokens(2, 20), tiny_model("gated_deltanet", fuse_linear_cross_entropy=True)
    expected = {name: x.clone() for name, x in loss_and_gradients(model.train(), ids).items()}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    loss = compiled(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close({"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}, expected)
    torch._dynamo.reset()
