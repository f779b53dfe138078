"""The loss in pieces against torch's cross-entropy of all logits, with every gradient, and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from fused_cases import HALF, Case, Results, test_interpreted, test_on_the_gpu  # noqa: F401
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deltazoo.ops.fused import linear_cross_entropy
from deltazoo.ops.fused import loss as module

ROWS, DIM, VOCABULARY = 50, 16, 37


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(ROWS, DIM), torch.randn(VOCABULARY, DIM)
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    labels[::7] = -100
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def of_all_logits(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="sum")


def loss_and_gradients(function, x: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Tensor]:
    loss = function(x, weight, labels)
    d_x, d_weight = torch.autograd.grad(loss / ROWS, [x, weight])
    return {"loss": loss.detach(), "d_x": d_x, "d_weight": d_weight}


@pytest.fixture(params=[1, 7, 25, 1000], ids=lambda rows: f"{rows}_rows_at_once")
def rows_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", request.param * VOCABULARY + 1)
    return request.param


def test_float64_differs_by_rounding_alone(rows_at_once: int) -> None:
    values = inputs(torch.float64)
    actual, expected = (loss_and_gradients(f, *values) for f in (linear_cross_entropy, of_all_logits))
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float16, False), (torch.float32, True)],
    ids=["float32", "bfloat16", "float16", "autocast"],
)
def test_as_accurate_as_all_logits_at_once(dtype: torch.dtype, autocast: bool, rows_at_once: int) -> None:
    """At most twice the error of all logits at once and four roundings, for any number of pieces."""
    values = inputs(dtype)
    exact = loss_and_gradients(of_all_logits, *(x.double() if x.is_floating_point() else x for x in values))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual, plain = (loss_and_gradients(f, *values) for f in (linear_cross_entropy, of_all_logits))
    for name, x in exact.items():
        assert actual[name].dtype == plain[name].dtype, name
        error, plain_error = ((found[name].double() - x).norm() / x.norm() for found in (actual, plain))
        allowed = 2 * plain_error + 2 * torch.finfo(torch.float32).eps
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e} (all logits at once: {plain_error:.2e})"


@pytest.mark.parametrize("autocast", [False, True])
def test_pieces_do_not_add_up_in_half_precision(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """600 pieces whose gradients have the same sign: summed in bfloat16, the weight's gradient would stop growing."""
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", 8)
    x, weight = torch.rand(600, DIM), torch.randn(8, DIM)
    if not autocast:
        x, weight = x.bfloat16(), weight.bfloat16()
    values = x, weight.requires_grad_(), torch.zeros(600, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        exact, actual = (
            torch.autograd.grad(f(*values), weight)[0].double() for f in (of_all_logits, linear_cross_entropy)
        )
    assert (actual - exact).norm() <= torch.finfo(torch.bfloat16).eps * exact.norm()


class Largest(TorchDispatchMode):
    """Records the most elements that any result of an operator has."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_more_logits_at_once_than_a_piece_has(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(512, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    labels = torch.randint(0, 100, (512,))
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", 3000)
    with Largest() as largest:
        loss_and_gradients(linear_cross_entropy, x, weight, labels)
    assert largest.elements == 3000
    with Largest() as largest:
        loss_and_gradients(of_all_logits, x, weight, labels)
    assert largest.elements == 51200


def test_a_vocabulary_larger_than_a_piece_takes_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", 3)
    values = inputs(torch.float64)
    torch.testing.assert_close(linear_cross_entropy(*values), of_all_logits(*values), rtol=1e-13, atol=0)


def test_nothing_counts() -> None:
    x, weight, labels = inputs(torch.float32)
    results = loss_and_gradients(linear_cross_entropy, x, weight, torch.full_like(labels, -100))
    assert all((result == 0).all() for result in results.values())


def test_frozen_inputs() -> None:
    x, weight, labels = inputs(torch.float32)
    (expected,) = torch.autograd.grad(of_all_logits(x, weight, labels), weight)
    (d_weight,) = torch.autograd.grad(linear_cross_entropy(x.detach(), weight, labels), weight)
    torch.testing.assert_close(d_weight, expected)
    assert not linear_cross_entropy(x.detach(), weight.detach(), labels).requires_grad


def test_a_label_is_missing() -> None:
    x, weight, labels = inputs(torch.float32)
    with pytest.raises(ValueError, match="50 positions to predict from, but 49 labels"):
        linear_cross_entropy(x, weight, labels[1:])


@pytest.mark.parametrize("label", [VOCABULARY, -1])
def test_labels_outside_the_vocabulary_are_refused_as_by_torch(label: int) -> None:
    x, weight, labels = inputs(torch.float32)
    labels[3] = label
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        linear_cross_entropy(x, weight, labels)


def test_tensors_without_data():
    x, weight = (torch.empty(n, 8, device="meta", requires_grad=True) for n in (5, 11))
    loss = linear_cross_entropy(x, weight, torch.zeros(5, dtype=torch.long, device="meta"))
    assert [d.shape for d in torch.autograd.grad(loss, (x, weight))] == [x.shape, weight.shape]


@dataclass(frozen=True)
class Loss(Case):
    """Cross-entropy per row and the gradient of its sum."""

    rows: int = 6
    vocabulary: int = 37
    most_columns: int = 4096
    impossible: int = 0
    """Columns from the first on that no row may take."""

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        generator = torch.Generator().manual_seed(0)
        logits = (4 * torch.randn(self.rows, self.vocabulary, generator=generator)).to(self.dtype)
        logits = logits.to(device, dtype or self.dtype)
        logits[:, : self.impossible] = -torch.inf
        labels = torch.randint(self.impossible, self.vocabulary, (self.rows,), generator=generator).to(device)
        labels[1] = -100
        if fused:
            with mock.patch.object(module, "_MOST_COLUMNS", self.most_columns):
                module._constants.cache_clear()
                losses, _ = module._cross_entropy(logits, labels, torch.float32, fused=True)
                return {"losses": losses, "gradient": logits}
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()
        losses = F.cross_entropy(wide, labels, reduction="none")
        return {"losses": losses.detach(), "gradient": torch.autograd.grad(losses.sum(), wide)[0].to(logits.dtype)}


CASES: list[Case] = [
    Loss("loss"),
    Loss("loss_in_several_blocks", vocabulary=150, most_columns=32),
    Loss("loss_half", dtype=HALF),
    Loss("loss_without_its_first_block", vocabulary=150, most_columns=32, impossible=40),
]


def test_gradients_that_nobody_wants_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, compute = [], module._loss_and_gradients
    monkeypatch.setattr(module, "_loss_and_gradients", lambda *given: asked.append(given[3:]) or compute(*given))
    for trained in product((False, True), repeat=2):
        x, weight = (torch.randn(n, 3).requires_grad_(needed) for n, needed in zip((4, 5), trained, strict=True))
        linear_cross_entropy(x, weight, torch.arange(4))
        with torch.no_grad():
            linear_cross_entropy(x, weight, torch.arange(4))
        assert asked == [trained, (False, False)]
        asked.clear()
