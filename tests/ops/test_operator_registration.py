"""How functions become operators of torch: who sees the operator, and that both ways give the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deltazoo.ops.operator import DifferentiableOperator, Operator


def forward(x: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """`x^2 + shift`; kept for the backward pass: 2 x, and None unless there is a shift."""
    return x * x if shift is None else x * x + shift, 2 * x, None if shift is None else torch.ones_like(shift)


def backward(slope: Tensor, ones: Tensor | None, d_y: Tensor) -> tuple[Tensor, Tensor | None]:
    return slope * d_y, None if ones is None else ones * d_y


def save(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    ctx.has_shift = inputs[1] is not None
    ctx.save_for_backward(*results[1:])


def gradients(backward: Any, ctx: Any, d_y: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor | None]:
    d_x, d_shift = backward(*ctx.saved_tensors, d_y)
    return d_x, d_shift if ctx.has_shift else None


square = DifferentiableOperator(
    "square_for_tests(Tensor x, Tensor? shift) -> (Tensor, Tensor, Tensor)",
    forward,
    fake=forward,
    backward=Operator(
        "square_for_tests_backward(Tensor slope, Tensor? ones, Tensor d_y) -> (Tensor, Tensor)",
        backward,
        fake=lambda slope, ones, d_y: (torch.empty_like(slope), None if ones is None else torch.empty_like(ones)),
    ),
    save=save,
    gradients=gradients,
    refusal=("the square", "take another"),
    shown=1,
)


class Calls(TorchDispatchMode):
    """Records the operators that a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))


class Subclass(Tensor):
    """Records the functions of torch that it is given to."""

    seen: list[Any]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def inputs(shifted: bool) -> tuple[Tensor, Tensor | None]:
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    return x, torch.ones(3, requires_grad=True) if shifted else None


@pytest.mark.parametrize("shifted", [False, True])
def test_a_dispatch_mode_and_a_compiler_see_the_operator_and_get_the_same(shifted: bool) -> None:
    def results(call: Any) -> list[Tensor]:
        given = inputs(shifted)
        (y,) = call(*given)
        return [y, *torch.autograd.grad(y.sum(), [x for x in given if x is not None])]

    plain = results(square)
    with Calls() as calls:
        watched = results(square)
    assert {"deltazoo::square_for_tests", "deltazoo::square_for_tests_backward"} <= calls.names
    compiled = results(torch.compile(lambda x, shift: square(x, shift), fullgraph=True, backend="aot_eager"))
    for other in (watched, compiled):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_a_plain_call_goes_around_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(square, "overload", None)
    (y,) = square(*inputs(True))
    assert y.requires_grad
    with torch.no_grad():
        assert not square(*inputs(False))[0].requires_grad


def test_a_subclass_of_tensor_sees_the_operator() -> None:
    Subclass.seen = []
    square(torch.ones(3).as_subclass(Subclass), None)
    assert torch.ops.deltazoo.square_for_tests.default in Subclass.seen


def test_the_operator_returns_empty_tensors_instead_of_none() -> None:
    x, _ = inputs(False)
    assert forward(x, None)[2] is None
    assert torch.ops.deltazoo.square_for_tests.default(x, None)[2].shape == (0,)


@pytest.mark.parametrize("call", [square, lambda *given: square.overload(*given)[:1]], ids=["plain", "operator"])
def test_second_derivatives_are_refused(call: Any) -> None:
    x, _ = inputs(False)
    (y,) = call(x, None)
    with pytest.raises(NotImplementedError, match=r"the square has no second derivative .*: take another"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
