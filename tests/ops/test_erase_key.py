"""What an erase key, the undecayed read and micro-steps reduce to, and published rules written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from delta_rule_cases import ERASE_CASES, MICRO_STEP_CASES, PER_TOKEN, DeltaRuleCase
from helpers import assert_close_in_float64, results_and_gradients
from torch import Tensor

from deltazoo.ops import delta_rule, linear_attention

BACKENDS = ("reference", "chunkwise")
SHAPE = dict(T=70, groups=2, K=12, V=8, initial_state=True)

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reads", ["decayed", "undecayed"])
@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
def test_an_erase_key_equal_to_k_is_none(decay: str, reads: str, backend: str) -> None:
    inputs = DeltaRuleCase("", **SHAPE, decay=decay, erase="equal", erase_reads=reads, beta=1.0).make()
    given = results_and_gradients(delta_rule, inputs, backend=backend)
    tied = replace(inputs, erase_key=None)
    given["d_k"] = given["d_k"] + given.pop("d_erase_key")
    assert_close_in_float64(given, results_and_gradients(delta_rule, tied, backend=backend), tied)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_decay_both_reads_are_one(backend: str) -> None:
    inputs = DeltaRuleCase("", **SHAPE, erase="gated", num_micro_steps=2).make()
    decayed = results_and_gradients(delta_rule, inputs, backend=backend)
    undecayed = results_and_gradients(delta_rule, replace(inputs, erase_reads="undecayed"), backend=backend)
    assert all(torch.equal(x, undecayed[name]) for name, x in decayed.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_undecayed_read_is_a_decayed_one_by_a_key_divided_by_the_decay(backend: str) -> None:
    case = DeltaRuleCase("", T=70, K=12, V=8, initial_state=True, decay="channel", erase="gated")
    inputs = replace(case.make(), erase_reads="undecayed")
    divided = replace(inputs, erase_key=inputs.erase_key / inputs.log_decay.exp(), erase_reads="decayed")
    undecayed, decayed = (delta_rule(**x.arguments(), backend=backend) for x in (inputs, divided))
    torch.testing.assert_close(undecayed, decayed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reads", ["decayed", "undecayed"])
def test_without_an_erase_key_direction_nothing_is_erased(reads: str, backend: str) -> None:
    inputs = DeltaRuleCase("", **SHAPE, decay="channel", erase="zero", erase_reads=reads).make()
    written = inputs.beta[..., None] * inputs.v
    arguments = (inputs.q, inputs.k, written, inputs.log_decay)
    expected = linear_attention(*arguments, initial_state=inputs.initial_state, backend=backend)
    torch.testing.assert_close(delta_rule(**inputs.arguments(), backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [case for case in MICRO_STEP_CASES if case.T > 1], ids=str)
def test_micro_steps_are_tokens_without_decay_or_query(case: DeltaRuleCase, backend: str) -> None:
    inputs, n = case.make(), case.num_micro_steps
    flat = results_and_gradients(delta_rule, inputs.flat(), backend=backend)
    for name, at in (("output", n - 1), ("d_q", n - 1), ("d_log_decay", 0)):
        if name in flat:
            flat[name] = flat[name][:, at::n]
    assert_close_in_float64(results_and_gradients(delta_rule, inputs, backend=backend), flat, inputs)


@pytest.mark.parametrize("case", [case for case in ERASE_CASES if case.lengths is None][::4], ids=str)
def test_one_micro_step_is_a_token(case: DeltaRuleCase) -> None:
    arguments = case.make(dtype=torch.float32).arguments()
    one = delta_rule(**arguments, num_micro_steps=1)
    assert all(torch.equal(a, b) for a, b in zip(one, delta_rule(**arguments), strict=True))


def side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """Two micro-steps of every token: `[B, T, ...]` twice -> `[B, 2 T, ...]`."""
    return torch.stack([first, second], 2).flatten(1, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_diagonal_plus_low_rank_is_two_micro_steps(backend: str) -> None:
    """S_t = (D_t + l_t r_t^T) S_{t-1} + k_t v_t^T with any l and r."""
    B, T, H, K, V = 2, 70, 2, 6, 5
    inputs = DeltaRuleCase("", B=B, T=T, H=H, K=K, V=V, decay="channel").make()
    q, k, v = inputs.q, inputs.k, inputs.v
    left, right = (torch.randn(B, T, H, K, dtype=torch.float64) / 4 for _ in range(2))

    state, outputs = torch.zeros(B, H, K, V, dtype=torch.float64), []
    for t in range(T):
        transition = torch.diag_embed(inputs.log_decay[:, t].exp()) + left[:, t, :, :, None] * right[:, t, :, None, :]
        state = transition @ state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((state * q[:, t, :, :, None]).sum(-2))

    output, final_state = delta_rule(
        q,
        side_by_side(left, k),
        side_by_side(torch.zeros_like(v), v),
        torch.ones(B, 2 * T, H, dtype=torch.float64),
        inputs.log_decay,
        erase_key=side_by_side(-right, torch.zeros_like(k)),
        erase_reads="undecayed",
        num_micro_steps=2,
        scale=1.0,
        backend=backend,
    )
    torch.testing.assert_close(output, torch.stack(outputs, 1))
    torch.testing.assert_close(final_state, state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_update_of_rwkv_7_is_two_micro_steps(backend: str) -> None:
    """S_t = S_{t-1} (diag(w) - c^T (a o c)) + v^T k, o_t = S_t r^T, on rows of S `[V, K]` (arXiv:2503.14456).

    c is a unit vector, a in (0, 1), and w in (0.545, 1): its logarithm is -0.6065 times a sigmoid.
    """
    B, T, H, K, V = 1, 70, 2, 6, 6
    r, k, v, raw_c, raw_a, raw_w = torch.randn(6, B, T, H, K, dtype=torch.float64)
    c, a = torch.nn.functional.normalize(raw_c, dim=-1), raw_a.sigmoid()
    log_w = -0.6065 * raw_w.sigmoid()

    state, outputs = torch.zeros(B, H, V, K, dtype=torch.float64), []
    for t in range(T):
        w_t, c_t, a_t, k_t, v_t, r_t = (x[:, t] for x in (log_w.exp(), c, a, k, v, r))
        removed = torch.einsum("bhvk,bhk->bhv", state, c_t)[..., None] * (a_t * c_t)[..., None, :]
        state = state * w_t[..., None, :] - removed + v_t[..., None] * k_t[..., None, :]
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, r_t))

    output, final_state = delta_rule(
        r,
        side_by_side(a * c, k),
        side_by_side(torch.zeros_like(v), v),
        torch.ones(B, 2 * T, H, dtype=torch.float64),
        log_w,
        erase_key=side_by_side(c, torch.zeros_like(k)),
        erase_reads="undecayed",
        num_micro_steps=2,
        scale=1.0,
        backend=backend,
    )
    torch.testing.assert_close(output, torch.stack(outputs, 1))
    torch.testing.assert_close(final_state, state.mT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_later_micro_steps_change_no_bit_of_earlier_tokens(backend: str) -> None:
    case = DeltaRuleCase("", T=70, decay="channel", erase="gated", erase_reads="undecayed", num_micro_steps=3)
    inputs = case.make(dtype=torch.float32)
    whole = delta_rule(**inputs.arguments(), backend=backend).output
    for t in (1, 21, 22, 64):
        assert torch.equal(delta_rule(**inputs.tokens(0, t).arguments(), backend=backend).output, whole[:, :t])
        changed = {n: getattr(inputs, n).clone() for n in ("q", "k", "v", "beta", "erase_key", "log_decay")}
        for name, x in changed.items():
            x[:, t * (1 if name in PER_TOKEN else 3) :] *= 0.5
        after = delta_rule(**replace(inputs, **changed).arguments(), backend=backend).output
        assert torch.equal(after[:, :t], whole[:, :t]) and not torch.equal(after, whole)
