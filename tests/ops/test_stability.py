"""No overflow and no lost accuracy: extreme decays and keys, long sequences, and the guard for beta near 2."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from delta_rule_cases import DeltaRuleCase, DeltaRuleInputs
from helpers import assert_within_reference, relative_errors, results_and_gradients
from oracle import delta_rule_by_chunks, delta_rule_by_transition_matrices
from pairwise import pairwise

from deltazoo.ops import delta_rule, step_size

BACKENDS = ("reference", "chunkwise")


def with_key_length(inputs: DeltaRuleInputs, length: float, rule: str) -> DeltaRuleInputs:
    """Keys of that length, and the effective step size that a rule gives them (b <= 1 where it is the gate itself)."""
    k = inputs.k * length
    b = inputs.beta / 2
    beta = {"euler": lambda: b, "exact": lambda: step_size.exact(b, k), "implicit": lambda: step_size.implicit(b, k)}
    return replace(inputs, k=k, beta=beta[rule]())


@pytest.mark.parametrize(
    ("decay", "keys", "g"),
    pairwise(
        ["scalar", "channel"],
        [(0.0, "exact"), (1e-20, "exact"), (1e-3, "implicit"), (1.0, "euler"), (30.0, "exact"), (1e4, "implicit")],
        [0.0, -1e-6, -5.0, -20.0, -80.0, -1e4, -torch.inf],
    ),
    ids=str,
)
def test_extreme_decays_and_keys_keep_every_result_finite_and_right(
    decay: str, keys: tuple[float, str], g: float
) -> None:
    length, rule = keys
    case = DeltaRuleCase("extreme", T=70, H=1, K=8, V=6, decay=decay, initial_state=True)
    inputs = with_key_length(case.make(dtype=torch.float32), length, rule)
    inputs = replace(inputs, log_decay=torch.full_like(inputs.log_decay, g))
    assert_within_reference(
        actual=results_and_gradients(delta_rule, inputs, backend="chunkwise"),
        exact=results_and_gradients(delta_rule_by_transition_matrices, inputs.double()),
        same_dtype=[
            results_and_gradients(delta_rule, inputs, backend="reference"),
            results_and_gradients(delta_rule_by_chunks, inputs),
        ],
        inputs=inputs,
        floor=8.0,  # a result may be one product of few factors here, with nothing for rounding errors to average over
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_channel_forgets_while_the_others_remember_everything(backend: str) -> None:
    inputs = DeltaRuleCase("one_channel", T=130, K=8, decay="channel", beta=0.0, initial_state=True).make()
    log_decay = torch.zeros_like(inputs.log_decay)
    log_decay[:, 77, :, 3] = -torch.inf
    _, state = delta_rule(**replace(inputs, log_decay=log_decay).arguments(), backend=backend)
    kept = inputs.initial_state.clone()
    kept[:, :, 3] = 0
    assert torch.equal(state, kept)


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
def test_forty_thousand_tokens_stay_finite_and_as_accurate_as_the_loop(decay: str) -> None:
    """The state after 43,884 tokens is that of its last 4,096 once decay has forgotten the rest."""
    case = DeltaRuleCase("long", B=1, T=43_884, H=1, K=16, V=8, decay=decay, log_decay=-0.05)
    inputs = case.make(dtype=torch.float32)
    results = results_and_gradients(delta_rule, inputs, backend="chunkwise")
    assert all(tensor.isfinite().all() for tensor in results.values())
    if decay != "none":
        last = delta_rule(**inputs.tokens(43_884 - 4096, 43_884).arguments(), backend="chunkwise").final_state
        torch.testing.assert_close(results["final_state"], last)


def test_weak_decays_add_up() -> None:
    """4,096 tokens at -1e-4 leave exp(-0.4096) of the state: one rounding per chunk of 64, not one per token."""
    inputs = DeltaRuleCase("weak", B=1, T=4096, H=1, K=4, V=4, decay="scalar", beta=0.0, initial_state=True)
    inputs = inputs.make(dtype=torch.float32)
    inputs = replace(inputs, log_decay=torch.full_like(inputs.log_decay, -1e-4))
    _, state = delta_rule(**inputs.arguments(), backend="chunkwise")
    expected = inputs.initial_state.double() * torch.tensor(-1e-4).double().mul(4096).exp()
    assert relative_errors({"state": state}, {"state": expected}, inputs)["state"] < 64 * 2**-24


def repeated_rounded_key(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The longest of 4,096 unit keys after rounding to bfloat16, repeated; a state along it; its squared length."""
    keys = torch.nn.functional.normalize(torch.randn(4096, 128, dtype=torch.float64), dim=-1).bfloat16().float()
    squared = keys.square().sum(-1)
    k = keys[squared.argmax()]
    state = (k / k.norm())[:, None] * torch.tensor([1.0, -2.0])
    return k.expand(1, tokens, 1, 128), state[None, None], squared.max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_guard_keeps_a_repeated_rounded_key_from_growing_the_state(backend: str) -> None:
    """beta = min(2, 2 / |k|^2) with the length of the rounded key: after 16,384 reflections the norm is what it was."""
    T = 16_384 if backend == "chunkwise" else 4096
    k, state, squared = repeated_rounded_key(T)
    assert squared > 1.001
    beta = torch.full((1, T, 1), 2.0).minimum(2 / squared)
    output, final_state = delta_rule(k, k, torch.zeros(1, T, 1, 2), beta, initial_state=state, backend=backend)
    assert final_state.norm() == pytest.approx(state.norm().item(), rel=1e-2)
    assert output.abs().max() <= 1.01 * output[:, 0].abs().max()


def test_without_the_guard_it_grows_by_orders_of_magnitude() -> None:
    """Why the guard is there: (2 |k|^2 - 1)^4096 with |k|^2 near 1.002."""
    k, state, squared = repeated_rounded_key(4096)
    _, final_state = delta_rule(
        k, k, torch.zeros(1, 4096, 1, 2), torch.full((1, 4096, 1), 2.0), initial_state=state, backend="chunkwise"
    )
    growth = (2 * squared.double() - 1) ** 4096
    assert growth > 1e3
    assert (final_state.norm() / state.norm()).item() == pytest.approx(growth.item(), rel=0.05)


@pytest.mark.parametrize("keys", ["same", "alternating"])
@pytest.mark.parametrize("beta", [1.0, 1.5, 1.8, 1.9, 1.98, 2.0])
def test_two_thousand_repeated_keys_stay_close_to_float64(beta: float, keys: str) -> None:
    """bfloat16 inputs, as in a negative-eigenvalue model on parity: 0.05 at most on every result and gradient."""
    case = DeltaRuleCase("repeated", B=1, T=2048, H=2, K=64, V=16, keys=keys, beta=beta, initial_state=True)
    inputs = case.make(dtype=torch.bfloat16)
    inputs = replace(inputs, beta=inputs.beta.minimum(2 / inputs.k.float().square().sum(-1)))
    errors = relative_errors(
        results_and_gradients(delta_rule, inputs, backend="chunkwise"),
        results_and_gradients(delta_rule, inputs.double(), backend="chunkwise"),
        inputs,
    )
    assert max(errors.values()) < 0.05, errors


def products(
    k: torch.Tensor,
    e: torch.Tensor,
    beta: float | torch.Tensor,
    tokens: int,
    log_decay: torch.Tensor | None = None,
    backend: str = "chunkwise",
) -> torch.Tensor:
    """What the operator makes of the identity when it writes nothing: the product of the tokens' factors, `[B, K, K]`.

    Args:
        k, e: `[B, P, K]`, keys and erase keys, repeated in turn up to `tokens`.
        beta: step size, a number or `[B, P]`.
        log_decay: `[K]`, of every token; None for no decay.
    """
    B, P, K = k.shape
    turn = torch.arange(tokens) % P
    k, e, beta = k[:, turn, None], e[:, turn, None], torch.as_tensor(beta).expand(B, P)[:, turn, None]
    decay = None if log_decay is None else log_decay.expand(B, tokens, 1, K)
    identity = torch.eye(K, dtype=k.dtype).expand(B, 1, K, K)
    zero = torch.zeros_like(k)
    state = delta_rule(
        zero, k, zero, beta.to(k.dtype), decay, erase_key=e, initial_state=identity, backend=backend
    ).final_state
    return state[:, 0]


def growth_per_round(k: torch.Tensor, e: torch.Tensor, log_decay: torch.Tensor | None, backend: str) -> float:
    """By how much 20 more rounds of the tokens stretch the state, per round, once 40 have turned it the worst way."""
    norms = [
        torch.linalg.matrix_norm(products(k, e, 1.0, rounds * k.shape[1], log_decay, backend), 2).item()
        for rounds in (40, 60)
    ]
    return (norms[1] / norms[0]) ** (1 / 20)


@pytest.mark.parametrize("backend", BACKENDS)
def test_norm_of_one_factor_with_an_erase_key(backend: str) -> None:
    """max(1, sigma) in closed form. Above 1 unless e is parallel to k: any other erase key stretches something."""
    k, e = torch.randn(2, 2000, 1, 5, dtype=torch.float64)
    e[:500] = k[:500] * torch.rand(500, 1, 1, dtype=torch.float64)
    beta = 2 * torch.rand(2000, 1, dtype=torch.float64)
    lengths = k.norm(dim=-1) * e.norm(dim=-1)
    cos = ((k * e).sum(-1) / lengths).clamp(-1, 1)
    a = beta * lengths
    sigma = (a + ((a - 2 * cos).square() + 4 * (1 - cos.square())).sqrt()) / 2
    norm = torch.linalg.matrix_norm(products(k, e, beta, 1, backend=backend), 2)[:, None]
    torch.testing.assert_close(norm, sigma.clamp_min(1), rtol=1e-7, atol=1e-7)
    assert (norm[500:] > 1).all()
    torch.testing.assert_close(norm[:500], (a[:500] - 1).clamp_min(1), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_repeated_token_stretches_by_at_most_one_over_the_cosine(backend: str) -> None:
    """Erase gains beta (e . k) in (0, 1], without decay; after 1,000 tokens the bound is reached."""
    k, e = torch.nn.functional.normalize(torch.randn(2, 500, 1, 5, dtype=torch.float64), dim=-1)
    cos = (k * e).sum(-1)
    e, cos = e * cos.sign()[..., None], cos.abs()
    e, cos = (e + k) / (e + k).norm(dim=-1, keepdim=True), ((1 + cos) / 2).sqrt()
    beta = 0.1 + 0.9 * torch.rand(500, 1, dtype=torch.float64)
    for tokens in (1, 3, 64, 1000):
        stretched = torch.linalg.matrix_norm(products(k, e, beta, tokens, backend=backend), 2)[:, None] * cos
        assert stretched.max() <= 1 + 1e-9
    assert stretched.min() > 1 - 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_alternating_tokens_grow_by_the_golden_ratio(backend: str) -> None:
    """Unit keys, beta 1, each erasing at right angles to where it writes: no bound holds for products of factors."""
    k = torch.eye(2, dtype=torch.float64)[None]
    growth = growth_per_round(k, k.flip(1), None, backend) ** 0.5
    assert growth == pytest.approx((1 + 5**0.5) / 2, rel=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_tokens_gated_per_channel_grow_though_each_alone_does_not(backend: str) -> None:
    """The rule of Gated DeltaNet-2, e = b o k with gates b in [0, 1] (arXiv:2605.22791): growth 1.230 a pair."""
    k = torch.tensor([[[0.5, 0.75**0.5], [0.75**0.5, 0.5]]], dtype=torch.float64)
    e = torch.eye(2, dtype=torch.float64) * k
    factors = torch.eye(2, dtype=torch.float64) - k[0, :, :, None] * e[0, :, None, :]
    alone = torch.linalg.eigvals(factors)
    assert not alone.imag.any() and alone.real.min() >= 0 and alone.real.max() <= 1
    radius = torch.linalg.eigvals(factors[1] @ factors[0]).abs().max().item()
    assert growth_per_round(k, e, None, backend) == pytest.approx(radius, rel=1e-9)
    assert radius == pytest.approx(1.230, abs=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_repeated_token_gated_per_channel_stays_bounded_under_any_decay(backend: str) -> None:
    """e = b o k with b > 0, decay per channel: in the coordinates sqrt(b) o S no direction is stretched."""
    k = torch.nn.functional.normalize(torch.randn(200, 1, 5, dtype=torch.float64), dim=-1)
    b = 0.1 + 0.9 * torch.rand_like(k)
    log_decay = torch.tensor([0.0, -1e-3, -0.1, -3.0, -torch.inf], dtype=torch.float64)
    for tokens in (1, 64, 500):
        product = products(k, b * k, 1.0, tokens, log_decay, backend)
        norm = torch.linalg.matrix_norm(b.mT.sqrt() * product / b.sqrt(), 2)
        assert norm.max() <= 1 + 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_grows_where_a_channel_of_erase_and_write_key_differ_in_sign(backend: str) -> None:
    """The rule of QED with decay per channel: 1.072 a token, though its erase gain is 0.64.

    e = b o k + lambda (b o q - (k . (b o q)) k), with one channel forgotten at each token and one kept.
    """
    k, b, q = torch.tensor([[0.6, 0.8], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    e = b * k + 0.25 * (b * q - (k @ (b * q)) * k)
    assert (e @ k).item() == pytest.approx(0.64)
    log_decay = torch.tensor([0.0, -torch.inf], dtype=torch.float64)
    assert growth_per_round(k[None, None], e[None, None], log_decay, backend) == pytest.approx(1.072, rel=1e-9)
    assert growth_per_round(k[None, None], e[None, None], None, backend) == pytest.approx(1.0, rel=1e-9)
