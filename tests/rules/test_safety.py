"""How far the state can grow: the class that each spec declares (`nonexpansive`), and a token repeated 16,384 times.

A token multiplies the state by a factor `(I - beta k e^T) D`, undecayed `D - beta k e^T`, with micro-steps by a product
of such. The factors are built here from what the layer passes to the operator.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import record_precision
from torch import Tensor
from transitions import factors_and_writes, steps

from deltazoo.layers import DeltaRuleAttention, LayerState, LayerStates, RuleInputs, make_layer
from deltazoo.layers import rule as rule_functions
from deltazoo.ops import delta_rule
from deltazoo.rules.comba_layer import Comba
from deltazoo.rules.momentum_layer import Momentum
from deltazoo.spec import NONEXPANSIVE_MEANING, get_rule, list_rules

HIDDEN, HEADS = 16, 2
SCALES = (0.1, 1.0, 10.0, 1000.0)
"""Of the layer's input: from gates near one half to gates that are all the way open or shut."""
ROUNDING = 1e-5
REPEATS = 2**14


def make(rule: str, head_dim: int, dtype: torch.dtype = torch.float32, **options: Any) -> DeltaRuleAttention:
    """With noise on all parameters, so that those that start at zero act too."""
    layer = make_layer(rule, HIDDEN, HEADS, head_dim, initializer_range=0.5, layer_idx=0, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return layer.to(dtype)


def run(
    layer: DeltaRuleAttention, x: Tensor, states: LayerStates | None = None, writes: Tensor | float = 1.0
) -> RuleInputs:
    """Run the layer with its values times `writes`; what it passed to the operator."""
    seen: list[RuleInputs] = []
    run_rule = layer.apply_rule

    def remember(inputs: RuleInputs, *args: Any) -> Any:
        seen.append(inputs._replace(v=inputs.v * writes))
        return run_rule(seen[0], *args)

    with torch.no_grad(), patch.object(layer, "apply_rule", remember):
        layer(x, past_key_values=states)
    return seen[0]


def norm(matrices: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrices, 2)


def spectral_radius(matrices: Tensor) -> Tensor:
    # The algorithm does not converge on entries near the smallest float64.
    return torch.linalg.eigvals(matrices.where(matrices.abs() > 1e-30, 0)).abs().amax(-1)


def sampled_factors(rule: str) -> Tensor:
    """Factors `[N, K, K]` of random tokens, from small gates to saturated ones, with doubled steps where allowed."""
    found = []
    for options in ({}, {"allow_neg_eigval": True}):
        for dtype in (torch.float32, torch.bfloat16):
            try:
                layer = make(rule, 4, dtype, **options)
            except ValueError:
                assert options  # the rule takes no doubled step
                continue
            x = torch.cat([scale * torch.randn(1, 64, HIDDEN) for scale in SCALES]).to(dtype)
            found.append(factors_and_writes(layer, run(layer, x))[0].flatten(0, 2))
    return torch.cat(found)


@pytest.mark.parametrize("rule", list_rules())
def test_the_declared_class_is_that_of_sampled_factors(rule: str) -> None:
    """ "yes": no factor is longer than 1. "conditional": some are, but no eigenvalue. "no": some eigenvalue is."""
    factors = sampled_factors(rule)
    norms = norm(factors)
    assert norms.max() > 0.5
    longer = factors[norms > 1 + ROUNDING]
    eigenvalue = spectral_radius(longer).max().item() if len(longer) else 1.0
    found = "yes" if not len(longer) else "conditional" if eigenvalue <= 1 + ROUNDING else "no"
    declared = get_rule(rule).nonexpansive_class
    assert declared == found, f"norm up to {norms.max():.6g}, eigenvalues up to {eigenvalue:.6g}"


def powers(factor: Tensor, write: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factor and write of `REPEATS` equal tokens, by squaring, and the largest norm of a power on the way."""
    longest = norm(factor)
    for _ in range(REPEATS.bit_length() - 1):
        factor, write = factor @ factor, factor @ write + write
        longest = longest.maximum(norm(factor))
    return factor, write, longest


def bound(layer: DeltaRuleAttention, inputs: RuleInputs, *, decays: bool) -> Tensor:
    """How long powers of the last token's factor can be, by the declared class, `[B, HV]`."""
    if layer.spec.nonexpansive_class == "yes":
        return torch.ones(1)
    per_channel = decays and layer.spec.decay == "channel"
    if per_channel and layer.spec.nonexpansive_class == "no":
        return torch.full((1,), torch.inf)
    ((k, e, _, beta),) = steps(layer, inputs)
    k, e, beta = k[:, -1], e[:, -1], beta[:, -1]
    if isinstance(layer, Momentum):
        return longest_of_momentum(layer, k, beta)
    if per_channel:  # e = B k, and B^1/2 M B^-1/2 is a contraction
        ratio = e / k  # NaN in channels that neither erase nor write
        return (ratio.nan_to_num(0, posinf=torch.inf).amax(-1) / ratio.nan_to_num(torch.inf).amin(-1)).sqrt()
    product = (k * e).sum(-1)
    cosine = product / (k.norm(dim=-1) * e.norm(dim=-1)).clamp_min(1e-300)
    return torch.where(beta * product <= 1, 1 / cosine, 1 + 2 / cosine)


def longest_of_momentum(layer: Momentum, k: Tensor, beta: Tensor) -> Tensor:
    """The largest norm of powers of what a token does to what is stored under its key, and to its momentum."""
    erased = (beta * (k * k).sum(-1) / 2)[..., None, None] * torch.tensor([[1.0, -1.0], [1.0, -1.0]]).double()
    mu = torch.sigmoid(layer.momentum.detach().double()).view(1, -1, 1, 1)
    factor = (torch.eye(2).double() - erased) * torch.cat([torch.ones_like(mu), mu], dim=-1)
    power, longest = factor, norm(factor)
    for _ in range(2000):
        power = factor @ power
        longest = longest.maximum(norm(power))
    return longest


@pytest.mark.parametrize(
    ("rule", "decay"),
    [
        *((name, "kept open") for name in list_rules()),
        *((name, "as it starts") for name in list_rules() if get_rule(name).decay != "none"),
    ],
)
def test_one_token_16k_times(rule: str, decay: str) -> None:
    """The state is that of the closed form, and what was in it at the start has grown no more than the class allows."""
    layer = make_layer(rule, HIDDEN, 1, 8, initializer_range=0.5, use_short_conv=False, layer_idx=0)
    if decay == "kept open":
        compute: Callable[[Tensor], Tensor | None] = layer.log_decay
        layer.log_decay = lambda x: None if (g := compute(x)) is None else torch.zeros_like(g)  # type: ignore[method-assign]
    states = LayerStates()
    token = torch.randn(1, 1, HIDDEN) * torch.tensor([1.0, 1.0, 100.0, 100.0]).view(4, 1, 1)
    run(layer, token, states)
    conv, recurrent, auxiliary = states.states[0]
    # In turns a row that starts with a state and writes nothing, and one that starts with zeros and writes.
    writes = torch.tensor([0.0, 1.0, 0.0, 1.0]).view(4, 1, 1, 1)
    start = torch.randn_like(recurrent) * (1 - writes)
    states.states[0] = LayerState(conv, start, auxiliary)
    inputs = run(layer, token.expand(-1, REPEATS, -1), states, writes)
    start, state = start.double(), states.states[0].recurrent.double()
    assert state.isfinite().all()

    last = RuleInputs(*(None if x is None else x[:, -1:] for x in inputs))  # type: ignore[arg-type]
    one_factor, one_write = (x[:, 0] for x in factors_and_writes(layer, last))
    factor, write, longest = powers(one_factor, one_write)
    # An eigenvalue of -1 has 16,384 times its rounding error.
    allowed = 1.01 * bound(layer, last, decays=decay != "kept open").expand_as(longest)
    assert (norm(state) <= allowed * norm(start))[::2].all()
    if decay == "kept open":
        assert (longest <= allowed).all()
    if auxiliary is None:  # else the first tokens have other factors
        expected = factor @ start + write
        assert (norm(state - expected) <= 0.01 * (norm(expected) + norm(start) + norm(one_write))).all()


def test_momentum_of_different_tokens_does_not_add_up() -> None:
    """Steps of b in all, for a momentum of 0.9: by steps of `b / (1 - mu)` the state would grow to 1e40 and more."""
    layer = make_layer("momentum", HIDDEN, 1, 8, initializer_range=0.5, use_short_conv=False, layer_idx=0)
    torch.nn.init.constant_(layer.momentum, 2.2)
    layer.log_decay = lambda x: torch.zeros(x.hidden_states.shape[:2] + (1,))  # type: ignore[method-assign]
    states = LayerStates()
    with torch.no_grad():
        layer(torch.randn(2, 3000, HIDDEN), past_key_values=states)
    assert 1 < norm(states.states[0].recurrent).max() < 100


def test_one_token_of_a_separate_erase_key_grows_up_to_one_over_the_cosine() -> None:
    """What "conditional" promises for one token, in the ranges of Gated DeltaNet-2: its key almost at right angles to
    the erase key `e = b o k`, 4,096 times, and the bound for any number of times."""
    short = 0.03
    k = torch.tensor([(1 - short**2) ** 0.5, short], dtype=torch.float64)
    e = torch.tensor([0.0, 1.0]) * k
    cosine = (k @ e) / e.norm()
    T = 4096
    keys, erase_keys = (x.expand(1, T, 1, 2) for x in (k, e))
    start, zeros, ones = torch.eye(2).double().view(1, 1, 2, 2), torch.zeros(1, T, 1, 2).double(), torch.ones(1, T, 1)
    end = delta_rule(keys, keys, zeros, ones.double(), erase_key=erase_keys, initial_state=start).final_state
    assert 32 < norm(end).item() <= 1 / cosine
    assert "different tokens may let it grow without bound" in NONEXPANSIVE_MEANING["conditional"]


def test_two_tokens_of_a_separate_erase_key_can_grow_together() -> None:
    """Why "conditional" promises nothing for different tokens: each factor has its eigenvalues in [0, 1], the pair has
    not. Keys and gates are in the ranges of Gated DeltaNet-2, `e = b o k` with b in [0, 1]."""
    long, short = 0.75**0.5, 0.5
    k = torch.tensor([[short, long], [long, short]], dtype=torch.float64)
    e = torch.tensor([[short, 0.0], [0.0, short]], dtype=torch.float64)
    factors = [torch.eye(2).double() - torch.outer(*pair) for pair in zip(k, e, strict=True)]
    assert all(torch.linalg.det(f) >= 0 and spectral_radius(f) <= 1 for f in factors)
    growth = spectral_radius(factors[1] @ factors[0]).item()
    assert growth == pytest.approx(1.230, abs=5e-4)

    T, start = 64, torch.eye(2).double().view(1, 1, 2, 2)
    keys, erase_keys = (x.repeat(T // 2, 1).view(1, T, 1, 2) for x in (k, e))
    zeros, ones = torch.zeros(1, T, 1, 2).double(), torch.ones(1, T, 1).double()
    state = delta_rule(keys, keys, zeros, ones, erase_key=erase_keys, initial_state=start).final_state
    assert norm(state).item() ** (2 / T) == pytest.approx(growth, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [name for name in list_rules() if get_rule(name).corrects])
def test_the_gain_of_a_layer_that_asks_for_fast_precision_stays_below_the_threshold(
    rule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of keys as rounded; where tokens erase under keys of their own, of any two tokens, as the operator counts it."""
    threshold = pytest.importorskip("deltazoo.ops.triton.chunk.inverse", reason="needs Triton").MAX_FAST_GAIN
    layer = make(rule, 64, dtype)  # unit keys of few channels are longer once rounded
    if isinstance(layer, Comba):  # the feedback all the way open
        torch.nn.init.constant_(layer.decay, 10.0)
    inputs = run(layer, torch.cat([scale * torch.randn(4, 64, HIDDEN) for scale in SCALES]).to(dtype))
    largest = 0.0
    for k, e, _, beta in steps(layer, inputs):
        of_two = torch.einsum("bth,bthd,bshd->bhts", beta, e, k).abs().tril()
        largest = max(largest, (of_two if inputs.erase_key is not None else of_two.diagonal(0, -2, -1)).max().item())
    assert largest > 0.9 or rule == "momentum"  # whose keys are at right angles
    asked = record_precision(monkeypatch, rule_functions)
    layer(torch.randn(1, 3, HIDDEN, dtype=dtype))
    if "fast" in asked:
        assert largest <= threshold.value
