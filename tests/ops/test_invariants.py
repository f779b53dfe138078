"""Properties for every input: cutting, packing and batching change no result, nor do later tokens, and the same inputs
give the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from delta_rule_cases import (
    ALL_CASES,
    ERASE_CASES,
    MICRO_STEP_CASES,
    PACKED_CASES,
    PER_MICRO_STEP,
    DeltaRuleCase,
    DeltaRuleInputs,
)
from helpers import assert_close_in_float64, assert_within_reference, results_and_gradients
from torch import Tensor

from deltazoo.ops import DeltaRuleOutput, delta_rule

BACKENDS = ("reference", "chunkwise")
ALONG_TIME = ("q", "k", "v", "beta", "log_decay")
DECAYS = ("none", "scalar", "channel")


def in_pieces(cuts: Sequence[int], *, initial_state: Tensor | None = None, **arguments: Any) -> DeltaRuleOutput:
    """The sequence cut at ``cuts``; each piece starts from the final state of the one before."""
    backend, tensors = arguments.pop("backend"), {n: x for n, x in arguments.items() if x is not None}
    T = tensors["q"].shape[1]
    outputs, state = [], initial_state
    for start, stop in zip([0, *cuts], [*cuts, T], strict=True):
        piece = {name: tensor[:, start:stop] for name, tensor in tensors.items()}
        output, state = delta_rule(**piece, initial_state=state, backend=backend)
        outputs.append(output)
    return DeltaRuleOutput(torch.cat(outputs, dim=1), state)


def one_by_one(*, cu_seqlens: Tensor, initial_state: Tensor | None = None, **arguments: Any) -> DeltaRuleOutput:
    """Packed sequences, each in a call of its own; an empty one returns its initial state."""
    tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
    options = {n: x for n, x in arguments.items() if n not in tensors and x is not None}
    v, micro_steps = tensors["v"], dict.fromkeys(PER_MICRO_STEP, options.get("num_micro_steps", 1))
    no_state = v.new_zeros(len(cu_seqlens) - 1, v.shape[2], tensors["k"].shape[3], v.shape[3])
    states = no_state if initial_state is None else initial_state
    outputs, final_states = [], []
    for n, (start, stop) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
        state = states[n : n + 1]
        if stop > start:
            spans = {name: (start * micro_steps.get(name, 1), stop * micro_steps.get(name, 1)) for name in tensors}
            piece = {name: tensor[:, slice(*spans[name])] for name, tensor in tensors.items()}
            output, state = delta_rule(**piece, initial_state=state, **options)
            outputs.append(output)
        final_states.append(state)
    return DeltaRuleOutput(torch.cat(outputs, dim=1), torch.cat(final_states))


def with_other_future(inputs: DeltaRuleInputs, t: int) -> DeltaRuleInputs:
    """All tokens from ``t`` on replaced: other unit keys and queries, large values, strong decay, beta 2."""
    other = {
        "q": torch.nn.functional.normalize(torch.randn_like(inputs.q), dim=-1),
        "k": torch.nn.functional.normalize(torch.randn_like(inputs.k), dim=-1),
        "v": torch.randn_like(inputs.v) * 100,
        "beta": torch.full_like(inputs.beta, 2.0),
    }
    if inputs.log_decay is not None:
        other["log_decay"] = -50 * torch.rand_like(inputs.log_decay)
    return replace(inputs, **{n: torch.cat([getattr(inputs, n)[:, :t], x[:, t:]], dim=1) for n, x in other.items()})


@pytest.mark.parametrize(
    ("backend", "decay", "cuts"),
    [
        *(("chunkwise", "channel", (cut,)) for cut in (1, 63, 64, 65, 129)),
        ("chunkwise", "channel", tuple(range(1, 130, 13))),
        *(("chunkwise", decay, (7, 70, 71, 120)) for decay in DECAYS),
        *(("reference", decay, (7, 70, 71, 120)) for decay in DECAYS),
    ],
    ids=str,
)
def test_a_sequence_in_pieces_is_the_whole(cuts: tuple[int, ...], decay: str, backend: str) -> None:
    case = DeltaRuleCase("pieces", T=130, groups=2, K=8, V=12, decay=decay, initial_state=True)
    inputs = case.make()
    whole = results_and_gradients(delta_rule, inputs, backend=backend)
    arguments = replace(inputs, cu_seqlens=None)

    def split(*, cu_seqlens: None, **kwargs: Any) -> DeltaRuleOutput:
        return in_pieces(cuts, **kwargs)

    assert_close_in_float64(results_and_gradients(split, arguments, backend=backend), whole, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_pieces_lose_no_more_accuracy_than_the_whole(decay: str, dtype: torch.dtype) -> None:
    """The state between two pieces is float32 whatever the dtype of the inputs, so cutting costs nothing."""
    inputs = DeltaRuleCase("pieces", T=200, decay=decay, initial_state=True).make(dtype=dtype)

    def split(*, cu_seqlens: None, **kwargs: Any) -> DeltaRuleOutput:
        return in_pieces((50, 64, 150), **kwargs)

    assert_within_reference(
        actual=results_and_gradients(split, inputs, backend="chunkwise"),
        exact=results_and_gradients(delta_rule, inputs.double(), backend="reference"),
        same_dtype=results_and_gradients(delta_rule, inputs, backend="chunkwise"),
        inputs=inputs,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case", [*PACKED_CASES, *(c for c in (*ERASE_CASES, *MICRO_STEP_CASES) if c.lengths is not None)], ids=str
)
def test_packed_sequences_are_the_sequences_alone(case: DeltaRuleCase, backend: str) -> None:
    inputs = case.make()
    packed = results_and_gradients(delta_rule, inputs, backend=backend)
    assert_close_in_float64(packed, results_and_gradients(one_by_one, inputs, backend=backend), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_sequence_hands_its_state_and_its_gradient_through(backend: str) -> None:
    case = DeltaRuleCase("empty", lengths=(0, 70, 0), decay="channel", initial_state=True)
    inputs = case.make()
    results = results_and_gradients(delta_rule, inputs, backend=backend)
    for n in (0, 2):
        assert torch.equal(results["final_state"][n], inputs.initial_state[n])
        assert torch.equal(results["d_initial_state"][n], inputs.d_final_state[n])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(("rows", "tokens"), [(0, 5), (2, 0), (0, 0)])
def test_without_rows_or_without_tokens(rows: int, tokens: int, state: bool, backend: str) -> None:
    inputs = DeltaRuleCase("", B=rows, T=tokens, decay="scalar", initial_state=state).make()
    output, final_state = delta_rule(**inputs.arguments(), backend=backend)
    assert output.shape == inputs.v.shape
    torch.testing.assert_close(final_state, inputs.initial_state if state else torch.zeros_like(inputs.d_final_state))
    v = inputs.v.requires_grad_()
    (output, _) = delta_rule(**inputs.arguments(), backend=backend)
    (gradient,) = torch.autograd.grad(output.sum(), v)
    assert gradient.shape == v.shape


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_leaks_from_one_packed_sequence_to_another(backend: str, dtype: torch.dtype) -> None:
    """Changing all of the middle sequence changes no bit of the other two, forward or backward."""
    bounds = (0, 50, 120, 190)
    inputs = DeltaRuleCase("leak", lengths=(50, 70, 70), decay="channel", initial_state=True).make(dtype=dtype)
    changed = {
        name: torch.cat([tensor[:, :50], tensor[:, 50:120].flip(1) * 2, tensor[:, 120:]], dim=1)
        for name in (*ALONG_TIME, "d_output")
        if (tensor := getattr(inputs, name)) is not None
    }
    for name in ("initial_state", "d_final_state"):
        changed[name] = getattr(inputs, name) * torch.tensor([1, -3, 1])[:, None, None, None]
    before = results_and_gradients(delta_rule, inputs, backend=backend)
    after = results_and_gradients(delta_rule, replace(inputs, **changed), backend=backend)
    for name in before:
        for n in (0, 2):
            part = n if name in ("final_state", "d_initial_state") else (0, slice(bounds[n], bounds[n + 1]))
            assert torch.equal(before[name][part], after[name][part]), f"{name} of sequence {n}"


@pytest.mark.parametrize(
    ("backend", "decay", "t"),
    [
        *(("chunkwise", decay, t) for decay in DECAYS for t in (1, 15, 16, 17, 63, 64, 65, 100, 129)),
        *(("reference", decay, 64) for decay in DECAYS),
    ],
)
def test_the_future_changes_no_bit_of_the_past(t: int, decay: str, backend: str) -> None:
    inputs = DeltaRuleCase("causal", T=130, K=20, decay=decay, initial_state=True).make(dtype=torch.float32)
    before = delta_rule(**inputs.arguments(), backend=backend).output
    after = delta_rule(**with_other_future(inputs, t).arguments(), backend=backend).output
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("t", [17, 64, 100])
def test_the_future_changes_no_bit_of_the_gradients_of_the_past(t: int, decay: str, backend: str) -> None:
    """Gradients of a loss on the outputs before ``t``, with and without another future."""
    inputs = DeltaRuleCase("causal", T=130, decay=decay, initial_state=True).make(dtype=torch.float32)
    d_output = inputs.d_output.clone()
    d_output[:, t:] = 0
    inputs = replace(inputs, d_output=d_output, d_final_state=torch.zeros_like(inputs.d_final_state))
    before = results_and_gradients(delta_rule, inputs, backend=backend)
    after = results_and_gradients(delta_rule, with_other_future(inputs, t), backend=backend)
    for name in (f"d_{n}" for n in inputs.leaves()):
        if name == "d_initial_state":
            assert torch.equal(before[name], after[name])
        else:
            assert torch.equal(before[name][:, :t], after[name][:, :t]), name
            assert not before[name][:, t:].any() and not after[name][:, t:].any(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 40, 64, 100])
def test_tokens_that_do_not_exist_yet_change_no_bit(length: int, backend: str) -> None:
    inputs = DeltaRuleCase("prefix", B=1, T=200, decay="channel").make(dtype=torch.float32)
    whole = delta_rule(**inputs.arguments(), backend=backend).output
    prefix = delta_rule(**inputs.tokens(0, length).arguments(), backend=backend).output
    assert torch.equal(prefix, whole[:, :length])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*ALL_CASES[::5], *ERASE_CASES[::5], *MICRO_STEP_CASES[::5]], ids=str)
def test_same_inputs_give_the_same_bits(case: DeltaRuleCase, backend: str) -> None:
    inputs = case.make(dtype=torch.float32)
    first, again = (results_and_gradients(delta_rule, inputs, backend=backend) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
def test_a_row_does_not_depend_on_its_batch(decay: str, backend: str) -> None:
    """Bit by bit, so that the answer to a prompt does not depend on the other prompts in the batch."""
    inputs = DeltaRuleCase("batch", B=8, T=70, decay=decay, initial_state=True).make(dtype=torch.float32)
    together = results_and_gradients(delta_rule, inputs, backend=backend)
    row = {name: getattr(inputs, name)[3:4] for name in (*inputs.leaves(), "d_output", "d_final_state")}
    alone = results_and_gradients(delta_rule, replace(inputs, **row), backend=backend)
    for name in alone:
        assert torch.equal(alone[name], together[name][3:4]), name
