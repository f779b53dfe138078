"""The definition against a second implementation of the recurrence and against numbers computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delta_rule_cases import (
    ALL_CASES,
    ERASE_CASES,
    GROWING_CASES,
    MICRO_STEP_CASES,
    DeltaRuleCase,
    random_cases,
    random_update_cases,
)
from helpers import assert_close_in_float64, results_and_gradients
from oracle import delta_rule_by_transition_matrices
from pairwise import pairwise

from deltazoo.ops import DeltaRuleOutput, delta_rule, linear_attention

pytestmark = pytest.mark.usefixtures("poisoned_empty")


UPDATE_CASES = [*ERASE_CASES, *GROWING_CASES, *MICRO_STEP_CASES, *random_update_cases(20, seed=3)]


@pytest.mark.parametrize("case", [*ALL_CASES, *random_cases(20, seed=1), *UPDATE_CASES], ids=str)
def test_reference_equals_transition_matrices_in_outputs_and_every_gradient(case: DeltaRuleCase) -> None:
    inputs = case.make(dtype=torch.float64)
    actual = results_and_gradients(delta_rule, inputs, backend="reference")
    expected = results_and_gradients(delta_rule_by_transition_matrices, inputs)
    assert_close_in_float64(actual, expected, inputs)


def test_two_tokens_computed_by_hand() -> None:
    """K = 2, V = 1, scale 1. A key written twice with beta 1/2, the state halved in between.

    S_0 = (8, 4); token 1: k = (1, 0), v = 2, no decay: S_1 = (8 + (2 - 8) / 2, 4) = (5, 4), q = (1, 1) reads 9.
    Token 2: decay 1/2 first: (2.5, 2); k = (0, 1), v = 6: S_2 = (2.5, 2 + (6 - 2) / 2) = (2.5, 4), q = (2, 1) reads 9.
    """

    def sequence(*rows: list[float]) -> torch.Tensor:
        return torch.tensor(rows)[None, :, None, :]

    result = delta_rule(
        q=sequence([1.0, 1.0], [2.0, 1.0]),
        k=sequence([1.0, 0.0], [0.0, 1.0]),
        v=sequence([2.0], [6.0]),
        beta=torch.full((1, 2, 1), 0.5),
        log_decay=torch.tensor([0.0, -torch.tensor(2.0).log()])[None, :, None],
        scale=1.0,
        initial_state=torch.tensor([8.0, 4.0])[None, None, :, None],
        backend="reference",
    )
    torch.testing.assert_close(result.output.flatten(), torch.tensor([9.0, 9.0]))
    torch.testing.assert_close(result.final_state.flatten(), torch.tensor([2.5, 4.0]))


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_result_has_the_shapes_and_dtypes_of_the_contract(backend: str, dtype: torch.dtype) -> None:
    case = DeltaRuleCase("contract", T=70, B=2, H=2, groups=2, K=8, V=12, decay="scalar")
    result = delta_rule(**case.make(dtype=dtype).arguments(), backend=backend)
    assert isinstance(result, DeltaRuleOutput) and result._fields == ("output", "final_state")
    assert result.output.shape == (2, 70, 4, 12) and result.output.dtype == dtype
    assert result.final_state.shape == (2, 4, 8, 12)
    assert result.final_state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
def test_gradients_have_the_dtypes_of_their_arguments(backend: str) -> None:
    inputs = DeltaRuleCase("dtypes", T=70, decay="channel", initial_state=True).make(dtype=torch.bfloat16)
    gradients = results_and_gradients(delta_rule, inputs, backend=backend)
    for name, argument in inputs.leaves().items():
        assert gradients[f"d_{name}"].dtype == argument.dtype, name
        assert gradients[f"d_{name}"].shape == argument.shape, name


@pytest.mark.parametrize(
    ("backend", "decay", "lengths", "function"),
    pairwise(["reference", "chunkwise"], ["none", "scalar", "channel"], [None, (0, 0)], [delta_rule, linear_attention]),
)
def test_no_tokens_hand_the_state_and_its_gradient_through(
    backend: str, decay: Any, lengths: tuple[int, ...] | None, function: Any
) -> None:
    """The results depend on all inputs, as those of a call with tokens do."""
    case = DeltaRuleCase("no_tokens", T=0, lengths=lengths, decay=decay, initial_state=True)
    inputs = case.make(dtype=torch.bfloat16)
    leaves = {name: x.requires_grad_() for name, x in inputs.leaves().items()}
    arguments = inputs.arguments()
    if function is linear_attention:
        del leaves["beta"], arguments["beta"]
    result = function(**arguments, backend=backend)
    assert result.output.shape[1] == 0 and result.output.dtype == torch.bfloat16
    assert torch.equal(result.final_state, leaves["initial_state"].float())
    seed = torch.randn_like(result.final_state)
    gradients = torch.autograd.grad(result, list(leaves.values()), (torch.zeros_like(result.output), seed))
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        assert torch.equal(gradient, seed.to(leaf.dtype) if name == "initial_state" else torch.zeros_like(leaf)), name

    fresh = function(**arguments | {"initial_state": None}, backend=backend)
    assert fresh.output.requires_grad and fresh.final_state.requires_grad and not fresh.final_state.any()


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
def test_scale_defaults_to_one_over_root_k(backend: str) -> None:
    inputs = DeltaRuleCase("scale", T=70, K=16).make().arguments()
    default = delta_rule(**inputs, backend=backend).output
    assert torch.equal(default, delta_rule(**inputs, scale=0.25, backend=backend).output)
    torch.testing.assert_close(delta_rule(**inputs, scale=1.0, backend=backend).output, default * 4)


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
@pytest.mark.parametrize("changes", [{}, {"erase": "free", "num_micro_steps": 2, "beta": 0.5}], ids=["tied", "erase"])
def test_value_head_j_uses_the_keys_of_key_head_j_over_group_size(changes: dict[str, Any], backend: str) -> None:
    inputs = DeltaRuleCase("groups", T=70, H=3, groups=2, decay="scalar", **changes).make().arguments()
    together = delta_rule(**inputs, backend=backend)
    for j in range(6):
        one = {n: inputs[n][:, :, j : j + 1] for n in ("v", "beta", "log_decay")}
        one |= {n: inputs[n][:, :, j // 2 : j // 2 + 1] for n in ("q", "k", "erase_key") if n in inputs}
        alone = delta_rule(**{**inputs, **one}, backend=backend)
        torch.testing.assert_close(together.output[:, :, j : j + 1], alone.output)
        torch.testing.assert_close(together.final_state[:, j : j + 1], alone.final_state)


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
def test_arguments_are_left_as_they_were(backend: str) -> None:
    inputs = DeltaRuleCase("untouched", T=70, decay="channel", initial_state=True).make(dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in inputs.leaves().items()}
    results_and_gradients(delta_rule, inputs, backend=backend)
    assert all(torch.equal(tensor, before[name]) for name, tensor in inputs.leaves().items())


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
def test_memory_order_does_not_matter(backend: str) -> None:
    """Heads taken out of one packed projection are strided views; gradients may arrive expanded or transposed."""
    inputs = DeltaRuleCase("strides", B=2, T=70, H=2, K=16, V=16, decay="channel", initial_state=True).make()
    dense = delta_rule(**inputs.arguments(), backend=backend)
    packed = torch.cat([inputs.q, inputs.k, inputs.v], dim=-1)
    q, k, v = packed.split(16, dim=-1)
    beta = inputs.beta.mT.contiguous().mT
    log_decay = inputs.log_decay.transpose(1, 3).contiguous().transpose(1, 3)
    state = inputs.initial_state.mT.contiguous().mT
    assert not any(x.is_contiguous() for x in (q, k, v, beta, log_decay, state))
    strided = delta_rule(q, k, v, beta, log_decay, initial_state=state, backend=backend)
    torch.testing.assert_close(strided, dense)

    leaf = inputs.v.clone().requires_grad_()
    output, _ = delta_rule(**{**inputs.arguments(), "v": leaf}, backend=backend)
    (from_expanded,) = torch.autograd.grad(output, leaf, torch.ones(()).double().expand_as(output), retain_graph=True)
    (from_dense,) = torch.autograd.grad(output, leaf, torch.ones_like(output))
    torch.testing.assert_close(from_expanded, from_dense)
