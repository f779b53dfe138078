"""Forward mode, the transforms of torch.func and second derivatives are right, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from delta_rule_cases import DeltaRuleCase, DeltaRuleInputs
from fresh_process import run_interpreted
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vjp, vmap

from deltazoo.ops import delta_rule, delta_rule_step, linear_attention, linear_attention_step
from deltazoo.ops.fused import linear_cross_entropy

CASES = [
    DeltaRuleCase("plain", B=1, T=20, H=1, K=3, V=2),
    DeltaRuleCase("scalar_grouped", B=2, T=37, H=1, groups=2, K=3, V=2, decay="scalar", initial_state=True),
    DeltaRuleCase("channel", B=2, T=37, K=3, V=2, decay="channel", initial_state=True),
    DeltaRuleCase("forgets", B=1, T=37, K=3, V=2, decay="channel", log_decay="reset", initial_state=True),
    DeltaRuleCase("packed", lengths=(19, 0, 3, 40), K=3, V=2, decay="scalar", initial_state=True),
    DeltaRuleCase("erase_scalar", T=20, groups=2, K=3, V=2, decay="scalar", erase="free", initial_state=True),
    DeltaRuleCase(
        "erase_undecayed_micro_steps",
        B=2,
        T=13,
        K=3,
        V=2,
        decay="channel",
        erase="gated",
        erase_reads="undecayed",
        num_micro_steps=2,
        initial_state=True,
    ),
]


def along(inputs: DeltaRuleInputs) -> dict[str, Tensor]:
    """A direction in the space of the differentiable inputs."""
    return {name: torch.randn_like(x) for name, x in inputs.leaves().items()}


def function_of(inputs: DeltaRuleInputs, **options: Any) -> Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]:
    return lambda leaves: tuple(delta_rule(**{**inputs.arguments(), **leaves}, **options))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tangents_and_gradients_are_those_of_plain_calls(case: DeltaRuleCase) -> None:
    """And tangents, contracted with the cotangents, are the gradients contracted with the direction."""
    inputs = case.make()
    leaves, tangents, cotangents = inputs.leaves(), along(inputs), (inputs.d_output, inputs.d_final_state)
    function = function_of(inputs, backend="chunkwise")
    values, found = jvp(function, (leaves,), (tangents,))
    (gradients,) = vjp(function, leaves)[1](cotangents)
    plain = function({name: x.requires_grad_() for name, x in leaves.items()})
    torch.testing.assert_close(values, plain)
    torch.testing.assert_close(tuple(gradients.values()), torch.autograd.grad(plain, leaves.values(), cotangents))
    contracted = sum((x * d).sum() for x, d in zip(found, cotangents, strict=True))
    torch.testing.assert_close(contracted, sum((gradients[name] * x).sum() for name, x in tangents.items()))


@pytest.mark.parametrize("backend", ["reference", "chunkwise", None])
def test_the_tangent_is_the_finite_difference(backend: str | None) -> None:
    inputs = CASES[2].make()
    function, leaves, tangents = function_of(inputs, backend=backend), inputs.leaves(), along(inputs)
    eps = 1e-6
    after, before = (function({n: x + s * tangents[n] for n, x in leaves.items()}) for s in (eps, -eps))
    expected = tuple((a - b) / (2 * eps) for a, b in zip(after, before, strict=True))
    torch.testing.assert_close(jvp(function, (leaves,), (tangents,))[1], expected, rtol=1e-6, atol=1e-7)
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(x, tangents[name]) for name, x in leaves.items()}
        found = tuple(forward_ad.unpack_dual(y).tangent for y in function(duals))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("batched", [["q", "v"], ["k"], ["log_decay"], ["initial_state", "beta"], ["erase_key"]])
def test_vmap_and_gradients_per_sample(batched: list[str]) -> None:
    """Some arguments are shared by all samples."""
    inputs = CASES[-1 if "erase_key" in batched else 2].make()
    leaves = {name: torch.stack([x, x.flip(0)]) if name in batched else x for name, x in inputs.leaves().items()}
    dims = {name: 0 if name in batched else None for name in leaves}

    def loss(leaves: dict[str, Tensor]) -> Tensor:
        output, state = delta_rule(**{**inputs.arguments(), **leaves}, backend="chunkwise")
        return output.sin().sum() + state.square().sum()

    found = vmap(grad(loss), (dims,))(leaves)
    for i in range(2):
        alone = {name: x[i] if name in batched else x for name, x in leaves.items()}
        torch.testing.assert_close({name: x[i] for name, x in found.items()}, grad(loss)(alone))


def test_values_are_checked_under_transforms_too() -> None:
    inputs = CASES[1].make()
    with pytest.raises(ValueError, match="log_decay must be <= 0"):
        vmap(lambda g: delta_rule(inputs.q[:1], inputs.k[:1], inputs.v[:1], inputs.beta[:1], g[None]).output)(
            -inputs.log_decay
        )


@pytest.mark.parametrize("decay", ["none", "channel"])
def test_linear_attention(decay: Any) -> None:
    inputs = DeltaRuleCase("", T=20, K=3, V=2, decay=decay, initial_state=True).make()
    leaves = {name: x for name, x in inputs.leaves().items() if name != "beta"}
    tangents = {name: torch.randn_like(x) for name, x in leaves.items()}
    chunks, loop = (
        jvp(lambda leaves, b=backend: tuple(linear_attention(**leaves, backend=b)), (leaves,), (tangents,))
        for backend in ("chunkwise", "reference")
    )
    torch.testing.assert_close(chunks, loop)


@pytest.mark.parametrize("step", [delta_rule_step, linear_attention_step])
def test_a_step_is_the_sequence_of_one_token(step: Callable[..., Any]) -> None:
    inputs = DeltaRuleCase("", T=1, K=3, V=2, decay="channel", initial_state=True).make()
    leaves = inputs.leaves()
    whole = delta_rule
    if step is linear_attention_step:
        whole = linear_attention
        del leaves["beta"]
    tangents = {name: torch.randn_like(x) for name, x in leaves.items()}

    def one(leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        tokens = {name: x for name, x in leaves.items() if name != "initial_state"}
        return tuple(step(**tokens, state=leaves["initial_state"]))

    expected = jvp(lambda leaves: tuple(whole(**leaves)), (leaves,), (tangents,))
    torch.testing.assert_close(jvp(one, (leaves,), (tangents,)), expected)


@pytest.mark.parametrize("update", [{}, dict(erase="free", erase_reads="undecayed", num_micro_steps=2)], ids=str)
def test_second_derivatives(update: dict[str, Any]) -> None:
    """Backward over backward, forward over backward, and forward over forward."""
    case = DeltaRuleCase("", B=1, T=18, H=1, groups=2, K=2, V=1, decay="channel", initial_state=True, **update)
    inputs = case.make()
    leaves = [x.requires_grad_() for x in inputs.leaves().values()]
    options = {name: x for name, x in inputs.arguments().items() if not isinstance(x, Tensor)}

    def function(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor, erase: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        # The square, for finite differences must not make it positive.
        tensors = dict(log_decay=-g.square(), initial_state=state, erase_key=erase)
        return tuple(delta_rule(q, k, v, beta, **tensors, **options, backend="chunkwise"))

    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True, check_fwd_over_rev=True)

    def loss(key: Tensor, backend: str) -> Tensor:
        others = {n: x.detach() for n, x in inputs.leaves().items() if n in ("q", "v", "beta", "erase_key")}
        return delta_rule(k=key, **others, **options, backend=backend).output.sum()

    key = inputs.k.detach()
    hessians = [jacfwd(jacfwd(lambda k, b=b: loss(k, b)))(key) for b in ("chunkwise", "reference")]
    torch.testing.assert_close(*hessians)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "log_decay", "initial_state", "erase_key"])
def test_second_derivative_in_one_argument(name: str) -> None:
    """The final state does not depend on q."""
    inputs = CASES[-1].make()
    leaf, direction = inputs.leaves()[name], along(inputs)[name]

    def second(backend: str) -> Any:
        function = function_of(inputs, backend=backend)
        return torch.autograd.functional.jvp(lambda x: function({name: x})[0], leaf, direction)

    torch.testing.assert_close(second("chunkwise"), second("reference"))


def test_batched_gradients_are_refused() -> None:
    inputs = CASES[2].make()
    q = inputs.q.requires_grad_()
    output = function_of(inputs, backend="chunkwise")({"q": q})[0]
    directions = torch.randn(3, *output.shape, dtype=output.dtype)
    with pytest.raises(NotImplementedError, match="no batched backward pass"):
        torch.autograd.grad(output, q, directions, is_grads_batched=True)


def test_second_derivative_where_all_arguments_are_one_tensor() -> None:
    x = torch.randn(1, 20, 1, 3, dtype=torch.float64, requires_grad=True)
    beta = torch.rand(1, 20, 1, dtype=torch.float64) / 4

    def second(backend: str) -> Tensor:
        loss = delta_rule(x, x, x, beta, backend=backend).output.sin().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(second("chunkwise"), second("reference"))


def test_a_loss_without_logits() -> None:
    x, weight, labels = torch.randn(5, 4), torch.randn(7, 4), torch.arange(5)
    tangents = (torch.randn(5, 4), torch.randn(7, 4))
    plain = lambda x, w: torch.nn.functional.cross_entropy(x @ w.T, labels, reduction="sum")  # noqa: E731
    found, expected = (
        (jvp(loss, (x, weight), tangents), grad(loss, (0, 1))(x, weight))
        for loss in (lambda x, w: linear_cross_entropy(x, w, labels), plain)
    )
    torch.testing.assert_close(found, expected)


def test_inside_a_compiled_function() -> None:
    inputs = DeltaRuleCase("", B=1, T=20, K=3, V=2).make()

    def tangent(q: Tensor, along: Tensor, backend: str = "chunkwise") -> Tensor:
        return jvp(lambda q: delta_rule(q, inputs.k, inputs.v, inputs.beta, backend=backend).output, (q,), (along,))[1]

    q, direction = inputs.q.clone(), torch.randn_like(inputs.q)
    compiled = torch.compile(tangent, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, direction), tangent(q, direction, "reference"))


TRITON_REFUSES = """
import pytest, torch
from torch.func import grad, jvp
from torch.utils.flop_counter import FlopCounterMode
from deltazoo.ops import delta_rule, delta_rule_step
from deltazoo.ops.fused import gated_rms_norm, short_convolution

x, beta, state = torch.randn(1, 4, 1, 16) / 4, torch.rand(1, 4, 1), torch.zeros(1, 1, 16, 16)
sequences = lambda x, backend="triton": delta_rule(x, x, x, beta, backend=backend).output.sin().sum()
step = lambda s, backend="triton": delta_rule_step(*[x[:, :1]] * 3, beta[:, :1], state=s, backend=backend).output.sum()
norm = lambda x: gated_rms_norm(x, x, torch.ones(16), 1e-6, "silu", fused=True).sum()
convolution = lambda x: short_convolution(x.flatten(2), torch.ones(16, 4), fused=True).sum()
for function, argument in [(sequences, x), (step, state), (norm, x), (convolution, x)]:
    for transform in (lambda f, x: jvp(f, (x,), (x,)), lambda f, x: grad(f)(x)):
        with pytest.raises(NotImplementedError, match="no forward mode and no torch.func transforms"):
            transform(function, argument)
for function in (sequences, norm, convolution):
    leaf = x.clone().requires_grad_()
    torch.autograd.grad(function(leaf), leaf)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(function(leaf), leaf, create_graph=True)
    with FlopCounterMode(display=False), pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(function(leaf), leaf, create_graph=True)
for function, argument in [(sequences, x), (step, torch.ones_like(state))]:  # nobody asked for triton by name
    found, expected = (jvp(lambda x: function(x, b), (argument,), (argument,))[1] for b in (None, "reference"))
    torch.testing.assert_close(found, expected)
    assert found != 0
"""


def test_triton_refuses_in_a_sentence() -> None:
    pytest.importorskip("triton")
    run_interpreted(TRITON_REFUSES)
