"""What `recomputable` calls leave behind, what runs again and when, and that gradients do not change."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.profiler import ProfilerActivity, profile

from deltazoo.ops.recompute import declare_recomputable, recomputable, recomputing

TOKENS, WIDTH = 64, 96


class Network:
    """Three functions around three matrix products; counts how often each function runs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)

        def leaf(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).div(8).requires_grad_()

        self.x, self.scale = leaf(TOKENS, WIDTH), leaf(WIDTH)
        self.first, self.second, self.third = leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH)
        self.runs: Counter[str] = Counter()

    def norm(self, x: Tensor, scale: Tensor) -> Tensor:
        self.runs["norm"] += 1
        return F.rms_norm(x, (WIDTH,)) * scale

    def gate(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.runs["gate"] += 1
        product = F.silu(x) * y.sigmoid()
        return product, product.sum(-1, keepdim=True)

    def tanh(self, x: Tensor) -> Tensor:
        self.runs["tanh"] += 1
        return x.tanh()

    def __call__(self) -> Tensor:
        normal = recomputable(self.norm, self.x, self.scale)
        product, total = recomputable(self.gate, F.linear(normal, self.first), F.linear(normal, self.second))
        turned = recomputable(self.tanh, product.view(WIDTH, TOKENS))  # its input is a view of a result
        return F.linear(turned.view(TOKENS, WIDTH), self.third).sum() + total.sum()

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.scale, self.first, self.second, self.third]


ONCE = {"norm": 1, "gate": 1, "tanh": 1}


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What goes, goes because nobody refers to it, not because the garbage collector breaks a circle."""
    gc.disable()
    yield
    gc.enable()


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_gradients_are_the_same_and_every_function_runs_once_more(network: Network) -> None:
    expected = torch.autograd.grad(network(), network.leaves)
    network.runs.clear()
    with recomputing():
        loss = network()
    assert network.runs == ONCE
    assert_same(torch.autograd.grad(loss, network.leaves), expected)
    assert network.runs == {name: 2 for name in ONCE}


def test_matrix_products_are_all_that_is_kept(network: Network) -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, recomputing():
        loss = network()
    kept = sum(event.self_cpu_memory_usage for event in recorded.key_averages())
    products = 2 * TOKENS * WIDTH * 4
    assert products <= kept < products * 1.1, kept / products
    assert loss.requires_grad


def test_a_graph_that_may_be_used_again(network: Network) -> None:
    expected = torch.autograd.grad(network(), network.leaves)
    with recomputing():
        loss = network()
    for _ in range(2):
        network.runs.clear()
        assert_same(torch.autograd.grad(loss, network.leaves, retain_graph=True), expected)
        assert network.runs == ONCE
    assert_same(torch.autograd.grad(loss, network.third), expected[4:])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, network.third)


def test_gradients_of_gradients(network: Network) -> None:
    def second_order(loss: Tensor) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(loss, network.leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in gradients), network.leaves)

    expected = second_order(network())
    with recomputing():
        loss = network()
    assert_same(second_order(loss), expected)


@pytest.mark.parametrize("frozen", [[0, 1], [1, 2], [0, 1, 2, 3]], ids=str)
def test_frozen_weights_and_inputs(network: Network, frozen: list[int]) -> None:
    for number in frozen:
        network.leaves[number].requires_grad_(False)
    wanted = [x for x in network.leaves if x.requires_grad]
    expected = torch.autograd.grad(network(), wanted)
    with recomputing():
        loss = network()
    assert_same(torch.autograd.grad(loss, wanted), expected)


def test_autocast_is_as_it_was_and_its_copies_are_not_kept(network: Network) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(network(), network.leaves)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, recomputing():
            loss = network()
    assert_same(torch.autograd.grad(loss, network.leaves), expected)
    kept = sum(event.self_cpu_memory_usage for event in recorded.key_averages())
    products, weights = 2 * TOKENS * WIDTH * 2, 3 * WIDTH * WIDTH * 2
    assert kept < (products + weights) * 1.1, kept / (products + weights)


class TestMemory:
    """Functions that keep nothing themselves: what runs again is what their results need."""

    def forward(self, network: Network, made: list[weakref.ref[Any]]) -> Tensor:
        def double(x: Tensor) -> Tensor:
            y = x * 2
            made.append(weakref.ref(y))
            return y

        made.append(weakref.ref(double))
        with recomputing():
            return F.linear(recomputable(double, network.x), network.first).sum()

    def test_goes_with_the_last_that_needs_it(self, network: Network, no_collector: None) -> None:
        made: list[weakref.ref[Any]] = []
        loss = self.forward(network, made)
        function, result = made
        assert function() is not None and result() is None
        loss.backward()
        assert len(made) == 3 and all(x() is None for x in made)

    def test_goes_after_each_of_several_backward_passes(self, network: Network, no_collector: None) -> None:
        made: list[weakref.ref[Any]] = []
        loss = self.forward(network, made)
        for runs in (2, 3):
            loss.backward(retain_graph=True)
            assert len(made) == 1 + runs and all(x() is None for x in made[1:])

    def test_goes_with_a_loss_that_nobody_differentiates(self, network: Network, no_collector: None) -> None:
        made: list[weakref.ref[Any]] = []
        loss = self.forward(network, made)
        del loss
        assert all(x() is None for x in made)


class TestChangesInPlace:
    def test_of_what_was_kept_is_noticed(self, network: Network) -> None:
        with recomputing():
            x = network.x * 1
            loss = F.linear(recomputable(torch.sigmoid, x), network.first).sum()
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_of_a_weight_is_noticed(self, network: Network) -> None:
        with recomputing():
            loss = network()
        with torch.no_grad():
            network.first.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_of_a_result_before_it_is_saved(self, network: Network) -> None:
        def forward() -> Tensor:
            y = recomputable(torch.add, network.x, network.scale)
            with torch.no_grad():
                y.mul_(3)
            return F.linear(y, network.first).sum()

        expected = torch.autograd.grad(forward(), network.first)
        with recomputing():
            loss = forward()
        assert_same(torch.autograd.grad(loss, network.first), expected)

    def test_by_the_backward_pass_of_the_function_itself(self, network: Network) -> None:
        """As some kernels do; a result that is needed again later must not come from what was written there."""
        with recomputing():
            x, y = network.x * 1, network.x * 2
            loss = F.linear(recomputable(_Overwriting.apply, x, y), network.first).sum()
        expected = torch.autograd.grad(F.linear(network.x * (network.x * 2), network.first).sum(), network.leaves[:3:2])
        assert_same(torch.autograd.grad(loss, network.leaves[:3:2], retain_graph=True), expected)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, network.first)


class _Overwriting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        d_x, d_y = gradient * y, gradient * x
        x.data.copy_(d_x)
        y.data.copy_(d_y)
        increment_version((x, y))
        return x, y


def test_a_result_that_is_the_input_itself(network: Network) -> None:
    expected = torch.autograd.grad(F.linear(network.x * 2, network.first).sum(), network.first)
    with recomputing():
        loss = F.linear(recomputable(lambda x: x, network.x * 2), network.first).sum()
    assert_same(torch.autograd.grad(loss, network.first), expected)


def test_calls_inside_one_another_count_once(network: Network) -> None:
    def both(x: Tensor, scale: Tensor) -> Tensor:
        return recomputable(network.tanh, recomputable(network.norm, x, scale))

    expected = torch.autograd.grad(both(network.x, network.scale).sum(), network.leaves[:2])
    with recomputing():
        loss = recomputable(both, network.x, network.scale).sum()
    network.runs.clear()
    assert_same(torch.autograd.grad(loss, network.leaves[:2]), expected)
    assert network.runs == {"norm": 1, "tanh": 1}


def test_a_function_that_fails_leaves_nothing_behind(network: Network) -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError(f"not {tuple(x.shape)}")

    with recomputing():
        with pytest.raises(ValueError, match="not"):
            recomputable(fail, network.x)
        loss = network()
    with pytest.raises(ValueError, match="not"), recomputing():
        recomputable(fail, network.x)
    network().backward()
    assert network.runs == {name: 2 for name in ONCE}
    loss.backward()
    assert network.runs == {name: 3 for name in ONCE}


def test_a_function_that_does_something_else_the_second_time_is_refused(network: Network) -> None:
    functions = [lambda x: x.sigmoid().tanh(), torch.sigmoid]

    with recomputing():
        loss = recomputable(lambda x: functions.pop(0)(x), network.x).sum()
    with pytest.raises(RuntimeError, match="saved 2 tensors, and 1 when it ran again"):
        loss.backward()


def test_without_gradients_nothing_is_recorded(network: Network) -> None:
    with torch.no_grad(), recomputing():
        assert not network().requires_grad
    assert network.runs == ONCE


def test_options_stand_among_the_tensors(no_collector: None) -> None:
    """They are kept for the second run, None too, and the call holds no tensor itself."""
    runs: list[tuple[object, ...]] = []

    def scaled(x: Tensor, factor: float, missing: None, y: Tensor, power: int) -> Tensor:
        runs.append((factor, missing, power))
        return (factor * x * y) ** power

    x, y = torch.randn(2, TOKENS, WIDTH).requires_grad_().unbind()
    product = F.relu(x)
    watched = weakref.ref(product)
    with recomputing():
        z = recomputable(scaled, product, 0.5, None, y, 3)
    del product
    assert watched() is None
    expected = torch.autograd.grad(((0.5 * F.relu(x) * y) ** 3).sum(), [x, y])
    assert all(map(torch.equal, torch.autograd.grad(z.sum(), [x, y]), expected))
    assert runs == [(0.5, None, 3)] * 2


def test_a_result_declared_to_be_that_of_a_function(network: Network, no_collector: None) -> None:
    """What made it differs from what makes it again: here a sum beside it is kept, and not the summands."""

    def loss(declared: bool) -> tuple[Tensor, Any]:
        summands = [F.linear(network.x, weight) for weight in (network.first, network.second)]
        total = summands[0] + summands[1]
        normal = network.norm(total, network.scale)
        if declared:
            declare_recomputable(normal, network.norm, total, network.scale)
        return F.linear(normal, network.third).sum(), weakref.ref(normal)

    expected = torch.autograd.grad(loss(declared=False)[0], network.leaves)
    network.runs.clear()
    with recomputing():
        output, normal = loss(declared=True)
    assert normal() is None and network.runs == {"norm": 1}
    torch.testing.assert_close(torch.autograd.grad(output, network.leaves), expected, rtol=0, atol=0)
    assert network.runs == {"norm": 2}


def test_outside_a_declaration_does_nothing(network: Network) -> None:
    y = network.norm(network.x, network.scale)
    declare_recomputable(y, network.norm, network.x, network.scale)
    assert network.runs == {"norm": 1} and torch.autograd.grad(y.sum(), network.x)
