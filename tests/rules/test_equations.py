"""Every rule against its equation, written out once more, token by token and head by head, from the papers."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.layers import DeltaRuleAttention, LayerStates, make_layer
from deltazoo.spec import list_rules, registering_module

HIDDEN, HEADS, VALUE_HEADS, K = 12, 2, 4, 4
GROUP = VALUE_HEADS // HEADS
TOKENS = 7
Weights = dict[str, Tensor]
EXACT = {"rtol": 0, "atol": 1e-12}


def convolved(weights: Weights, x: Tensor, name: str) -> Tensor:
    """SiLU of the causal convolution of one projection `[T, channels]`."""
    y = x @ weights[f"{name}_proj.weight"].T
    kernel = weights[f"{name}_conv1d.weight"]
    return F.silu(F.conv1d(F.pad(y.T, (3, 0)), kernel, groups=len(kernel)).T)


def unit(x: Tensor) -> Tensor:
    return x / (x @ x + 1e-6).sqrt()


def gate(weights: Weights, x: Tensor, head: int) -> Tensor:
    return torch.sigmoid(weights["b_proj.weight"][head] @ x)


def scalar_decay(weights: Weights, x: Tensor, head: int) -> Tensor:
    a = weights["a_proj.weight"][head] @ x
    g = -torch.exp(weights["A_log"][head]) * torch.log(1 + torch.exp(a + weights["dt_bias"][head]))
    return torch.exp(g) * torch.eye(K, dtype=x.dtype)


def channel_decay(weights: Weights, x: Tensor, head: int) -> Tensor:
    channels = slice(head * K, (head + 1) * K)
    a = weights["f_proj.1.weight"][channels] @ weights["f_proj.0.weight"] @ x
    g = -torch.exp(weights["A_log"][head]) * torch.log(1 + torch.exp(a + weights["dt_bias"][channels]))
    return torch.diag(torch.exp(g))


def no_decay(weights: Weights, x: Tensor, head: int) -> Tensor:
    return torch.eye(K, dtype=x.dtype)


def full_silu_gate(weights: Weights, x: Tensor) -> Tensor:
    return F.silu(weights["g_proj.weight"] @ x)


def low_rank_sigmoid_gate(weights: Weights, x: Tensor) -> Tensor:
    return torch.sigmoid(weights["g_proj.1.weight"] @ weights["g_proj.0.weight"] @ x + weights["g_proj.1.bias"])


def full_sigmoid_gate(weights: Weights, x: Tensor) -> Tensor:
    return torch.sigmoid(weights["g_proj.weight"] @ x)


def no_gate(weights: Weights, x: Tensor) -> Tensor:
    return torch.ones((), dtype=x.dtype)


# Per rule: (erase, write) from gate b and squared key length l; key as it enters; decay; output gate.
Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def euler(b: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    return b, b


def doubled(b: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    return 2 * b, 2 * b


def exact(b: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    return (1 - torch.exp(-b * l)) / l, (1 - torch.exp(-b * l)) / l


def kaczmarz(b: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    return b / (l + 1e-6), b / (l + 1e-6)


def implicit(b: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    return b / (1 + b * l), b / (1 + b * l)


RULES: dict[str, tuple[Rule | None, bool, Callable, Callable]] = {
    "linear_attention": (None, False, no_decay, no_gate),
    "mamba2_style": (None, False, scalar_decay, full_silu_gate),
    "delta_net": (euler, True, no_decay, no_gate),
    "neg_delta_net": (doubled, True, no_decay, no_gate),
    "gated_deltanet": (euler, True, scalar_decay, full_silu_gate),
    "neg_gated_deltanet": (doubled, True, scalar_decay, full_silu_gate),
    "efla": (exact, False, no_decay, no_gate),
    "longhorn": (implicit, False, no_decay, no_gate),
    "kda": (euler, True, channel_decay, low_rank_sigmoid_gate),
    "kaczmarz": (kaczmarz, False, scalar_decay, full_silu_gate),
    "gated_efla": (exact, False, scalar_decay, full_silu_gate),
    "gated_longhorn": (implicit, False, scalar_decay, full_silu_gate),
}


class Token(NamedTuple):
    """What a head's update sees of a token: its input, and q, k and v of all heads after convolution and SiLU."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    so_far: Sequence["Token"] = ()
    """Of the sequence, this one included."""

    def query(self, head: int) -> Tensor:
        return self.q.view(-1, K)[head // GROUP]

    def key(self, head: int, step: int = 0) -> Tensor:
        return self.k.view(-1, K)[step * HEADS + head // GROUP]

    def value(self, head: int, value_dim: int, step: int = 0) -> Tensor:
        return self.v.view(-1, value_dim)[step * VALUE_HEADS + head]


def gated_deltaproduct(weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """`A = prod_j (I - beta_j k_j k_j^T) alpha`, `B = sum_j (prod_{i > j} (I - beta_i k_i k_i^T)) beta_j k_j v_j^T`."""
    A, B = scalar_decay(weights, token.x, head), torch.zeros_like(S)
    for step in range(2):
        beta, k = 2 * gate(weights, token.x, step * VALUE_HEADS + head), unit(token.key(head, step))
        H = torch.eye(K, dtype=S.dtype) - beta * torch.outer(k, k)
        A, B = H @ A, H @ B + beta * torch.outer(k, token.value(head, S.shape[1], step))
    S = A @ S + B
    return S, S.T @ unit(token.query(head))


def eda(weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """Decay, erase at e with strength gamma, then correct and write at k with strength beta."""
    channels, keys = slice(head * K, (head + 1) * K), slice(head // GROUP * K, (head // GROUP + 1) * K)
    a = weights["f_proj.1.weight"][channels] @ weights["f_proj.0.weight"] @ token.x
    rate = torch.exp(weights["A_log"][head]) * torch.log(1 + torch.exp(a + weights["dt_bias"][channels]))
    bound = -5.0
    alpha = torch.exp(bound * (1 - torch.exp(-rate / abs(bound))))
    e = unit((weights["erase_proj.1.weight"] @ weights["erase_proj.0.weight"] @ token.x)[keys])
    gamma = torch.sigmoid(weights["erase_b_proj.weight"][head] @ token.x)
    beta, k, v = gate(weights, token.x, head), unit(token.key(head)), token.value(head, S.shape[1])
    S = alpha[:, None] * S
    S = S - gamma * torch.outer(e, e @ S)
    S = S + beta * torch.outer(k, v - k @ S)
    return S, S.T @ unit(token.query(head))


def gated_deltanet2(weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """`S_t = (I - k_t (b_t o k_t)^T) D_t S_{t-1} + k_t (w_t o v_t)^T`."""
    b, w = channel_gates(weights, token, head)
    k, v = unit(token.key(head)), token.value(head, S.shape[1])
    transition = (torch.eye(K, dtype=S.dtype) - torch.outer(k, b * k)) @ channel_decay(weights, token.x, head)
    S = transition @ S + torch.outer(k, w * v)
    return S, S.T @ unit(token.query(head))


def channel_gates(weights: Weights, token: Token, head: int) -> tuple[Tensor, Tensor]:
    b = torch.sigmoid(weights["b_proj.weight"].view(HEADS, K, HIDDEN)[head // GROUP] @ token.x)
    return b, torch.sigmoid(weights["w_proj.weight"].view(VALUE_HEADS, -1, HIDDEN)[head] @ token.x)


def qed(weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """`S_t = (I - k_t a_t^T) D_t S_{t-1} + k_t (w_t o v_t)^T`, `a = b o k + lambda d`, `d = (I - k k^T) (b o q)`."""
    b, w = channel_gates(weights, token, head)
    q, k, v = unit(token.query(head)), unit(token.key(head)), token.value(head, S.shape[1])
    d = (torch.eye(K, dtype=S.dtype) - torch.outer(k, k)) @ (b * q)
    a = b * k + 0.25 * torch.sigmoid(weights["theta"][head // GROUP]) * d
    transition = (torch.eye(K, dtype=S.dtype) - torch.outer(k, a)) @ channel_decay(weights, token.x, head)
    S = transition @ S + torch.outer(k, w * v)
    return S, S.T @ q


def q_delta(weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """`S_t = alpha_t S_{t-1} (I - beta_t x_t k_t^T) + beta_t v_t k_t^T`, `x = k + lambda q`, on values by keys."""
    q, k, v = unit(token.query(head)), unit(token.key(head)), token.value(head, S.shape[1])
    beta, alpha = gate(weights, token.x, head), scalar_decay(weights, token.x, head)
    x = k + torch.sigmoid(weights["lamb_proj.weight"][head // GROUP] @ token.x - 0.9) * q
    M = S.T @ alpha @ (torch.eye(K, dtype=S.dtype) - beta * torch.outer(x, k)) + beta * torch.outer(v, k)
    return M.T, M @ q


def comba(weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """`S_t = S_{t-1} (alpha_t I - c beta_t k_t k_t^T) + beta_t v_t k_t^T`, `o_t = S_t (q_t - d k_t)`, S transposed."""
    q, k = unit(token.query(head)), unit(token.key(head))
    c, d = torch.sigmoid(weights["decay"][head // GROUP]), weights["D"][head // GROUP]
    M = comba_state(weights, token, head, S, k, c * k)
    return M.T, M @ (q - d * k)


def comba_unit_erase(weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """The same with `p = c k` before the norms: `q - d p`, k and the erase key p are normalised last."""
    q, k = token.query(head), token.key(head)
    p = torch.sigmoid(weights["decay"][head // GROUP]) * k
    M = comba_state(weights, token, head, S, unit(k), unit(p))
    return M.T, M @ unit(q - weights["D"][head // GROUP] * p)


def comba_state(weights: Weights, token: Token, head: int, S: Tensor, k: Tensor, e: Tensor) -> Tensor:
    beta, alpha = gate(weights, token.x, head), scalar_decay(weights, token.x, head)
    return S.T @ (alpha - beta * torch.outer(e, k)) + beta * torch.outer(token.value(head, S.shape[1]), k)


def preconditioned(
    decay: Callable, moment_gate: str, weights: Weights, token: Token, head: int, S: Tensor
) -> tuple[Tensor, Tensor]:
    """`S_t = (I - beta_t P_t k_t k_t^T) D_t S_{t-1} + beta_t P_t k_t v_t^T`, P diagonal.

    P comes from the moment of the keys, here as the sum it is: squares times their steps and all later decays.
    """
    key_head, A = head // GROUP, torch.zeros(K, dtype=S.dtype)
    for number, past in enumerate(token.so_far):
        later = [moment_decay(weights, moment_gate, x, key_head) for x, *_ in token.so_far[number + 1 :]]
        step = torch.sigmoid(weights["b_atk_proj.weight"][key_head] @ past.x)
        A = A + torch.exp(sum(later, torch.zeros(()))) * step * unit(past.key(head)).square()
    r = torch.log(A + 1e-6) - weights["log_atk_scale"][key_head]
    P = torch.diag(1.5 ** (-r / (1 + r.abs())))
    beta, k = gate(weights, token.x, head), unit(token.key(head))
    transition = (torch.eye(K, dtype=S.dtype) - beta * P @ torch.outer(k, k)) @ decay(weights, token.x, head)
    S = transition @ S + beta * torch.outer(P @ k, token.value(head, S.shape[1]))
    return S, S.T @ unit(token.query(head))


def moment_decay(weights: Weights, name: str, x: Tensor, head: int) -> Tensor:
    logit = weights[f"{name}.weight"][head] @ x + weights["dt_bias_atk"][head]
    return -torch.exp(weights["A_log_atk"][head]) * torch.log(1 + torch.exp(logit))


def fg2_gdn(weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """`k~ = sqrt(b) k`, `v~ = sqrt(w) v`, `S = (I - k~ k~^T) Diag(alpha) S + k~ v~^T`."""
    b, w = channel_gates(weights, token, head)
    k, v = b.sqrt() * unit(token.key(head)), w.sqrt() * token.value(head, S.shape[1])
    M = torch.eye(K, dtype=S.dtype) - torch.outer(k, k)
    S = M @ channel_decay(weights, token.x, head) @ S + torch.outer(k, v)
    return S, S.T @ unit(token.query(head))


def gla(weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """`alpha = sigmoid(x W1 W2 + b)^(1/16)`, `S = Diag(alpha) S + k v^T`."""
    channels = slice(head * K, (head + 1) * K)
    a = weights["gk_proj.1.weight"][channels] @ weights["gk_proj.0.weight"] @ token.x
    alpha = torch.sigmoid(a + weights["gk_proj.1.bias"][channels]) ** (1 / 16)
    S = alpha[:, None] * S + torch.outer(token.key(head), token.value(head, S.shape[1]))
    return S, S.T @ token.query(head)


def lightning_attention(weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """`S = lambda S + k v^T`, with the slopes of ALiBi."""
    slope = (1 / 2 ** (8 / VALUE_HEADS)) ** (head + 1) * (1 + 1e-5)  # the first layer's
    S = math.exp(-slope) * S + torch.outer(token.key(head), token.value(head, S.shape[1]))
    return S, S.T @ token.query(head)


def falcon(weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """`S = (1 - eta lambda) S + eta x (v_t - S^T x)^T` with `x = k_{t-1}`, `eta = b / (|x|^2 + lambda + 1e-6)`.

    The first token of a sequence leaves the state as it is.
    """
    if len(token.so_far) > 1:
        x = unit(token.so_far[-2].key(head))
        rate = torch.exp(weights["A_log"][head])
        ridge = rate * torch.log(1 + torch.exp(weights["a_proj.weight"][head] @ token.x + weights["dt_bias"][head]))
        eta = gate(weights, token.x, head) / (x @ x + ridge + 1e-6)
        S = (1 - eta * ridge) * S + eta * torch.outer(x, token.value(head, S.shape[1]) - S.T @ x)
    return S, S.T @ unit(token.query(head))


def momentum(weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """`M_t = a mu M_{t-1} + (1 - mu) b k (v - a S_{t-1}^T k)^T`, `S_t = a S_{t-1} + M_t`.

    The layer's state is `[S + mu R; R]` with `R = M / (1 - mu)`.
    """
    mu = torch.sigmoid(weights["momentum"][head // GROUP])
    S, M = S[:K] - mu * S[K:], (1 - mu) * S[K:]
    k, decayed = unit(token.key(head)), scalar_decay(weights, token.x, head) @ S
    error = token.value(head, S.shape[1]) - decayed.T @ k
    M = mu * scalar_decay(weights, token.x, head) @ M
    M = M + (1 - mu) * gate(weights, token.x, head) * torch.outer(k, error)
    S = decayed + M
    R = M / (1 - mu)
    return torch.cat([S + mu * R, R]), S.T @ unit(token.query(head))


def kalman(one_variance: bool, weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """A Kalman filter whose covariance is a multiple of I, or a diagonal, from the first token on.

    `P^ = D P D + W`, `gain = P^ k / (r + k^T P^ k)`, and in place of the exact P what the paper has: the precision of
    each channel grows by `K k_i^2 / r`, or by their mean.
    """
    P = torch.eye(K, dtype=S.dtype) / (torch.log(1 + torch.exp(weights["start_precision"][head])) + 0.1)
    channels = slice(head * K, (head + 1) * K)
    for past in token.so_far:
        k, D = unit(past.key(head)), channel_decay(weights, past.x, head)
        r = torch.log(1 + torch.exp(-weights["b_proj.weight"][head] @ past.x)) + 0.01
        if one_variance:
            w = weights["omega_proj.weight"][head] @ past.x + weights["omega_proj.bias"][head]
            P = P * (D @ D).trace() / K + torch.log(1 + torch.exp(w)) * torch.eye(K, dtype=S.dtype)
        else:
            w = weights["omega_proj.1.weight"][channels] @ weights["omega_proj.0.weight"] @ past.x
            P = D @ P @ D + torch.diag(torch.log(1 + torch.exp(w + weights["omega_proj.1.bias"][channels])))
        gain = P @ k / (r + k @ P @ k)
        information = (k @ k).expand(K) if one_variance else K * k.square()
        P = torch.linalg.inv(torch.linalg.inv(P) + torch.diag(information) / r)
    S = (torch.eye(K, dtype=S.dtype) - torch.outer(gain, k)) @ D @ S + torch.outer(gain, token.value(head, S.shape[1]))
    return S, S.T @ unit(token.query(head))


Update = Callable[[Weights, Token, int, Tensor], tuple[Tensor, Tensor]]
UPDATES: dict[str, tuple[Update, Callable]] = {
    "gated_deltaproduct": (gated_deltaproduct, full_silu_gate),
    "eda": (eda, full_sigmoid_gate),
    "gated_deltanet2": (gated_deltanet2, low_rank_sigmoid_gate),
    "qed": (qed, low_rank_sigmoid_gate),
    "q_delta": (q_delta, full_silu_gate),
    "comba": (comba, full_sigmoid_gate),
    "comba_unit_erase": (comba_unit_erase, full_sigmoid_gate),
    "pgdn": (partial(preconditioned, scalar_decay, "a_atk_proj"), no_gate),
    "pkda": (partial(preconditioned, channel_decay, "a_proj"), low_rank_sigmoid_gate),
    "fg2_gdn": (fg2_gdn, low_rank_sigmoid_gate),
    "gla": (gla, full_silu_gate),
    "lightning_attention": (lightning_attention, full_sigmoid_gate),
    "falcon": (falcon, no_gate),
    "momentum": (momentum, full_sigmoid_gate),
    "isotropic_kdn": (partial(kalman, True), low_rank_sigmoid_gate),
    "diagonal_kdn": (partial(kalman, False), low_rank_sigmoid_gate),
}
"""Rules whose update is not of the form above: from weights, token, head and state to the state and its read by q; and
the output gate."""


UNSCALED = ("lightning_attention", "falcon")
"""Rules whose queries are not multiplied by K^-1/2."""
KEY_CHANNELS = {"momentum": 2 * K}
"""Of the states of rules that have others than K."""


def by_hand(rule: str, weights: Weights, x: Tensor, value_dim: int, neg_eigval: str = "both") -> tuple[Tensor, Tensor]:
    """The layer's output for one sequence `[T, hidden]`, and the state after it."""
    update, output_gate = UPDATES.get(rule) or (partial(one_step, rule, neg_eigval), RULES[rule][3])
    q, k, v = (convolved(weights, x, name) for name in "qkv")
    outputs, states = torch.zeros(len(x), VALUE_HEADS * value_dim, dtype=x.dtype), []
    for head in range(VALUE_HEADS):
        values = slice(head * value_dim, (head + 1) * value_dim)
        S = torch.zeros(KEY_CHANNELS.get(rule, K), value_dim, dtype=x.dtype)
        tokens = [Token(*of_token) for of_token in zip(x, q, k, v, strict=True)]
        for t, token in enumerate(tokens):
            S, read = update(weights, token._replace(so_far=tokens[: t + 1]), head, S)
            o = read if rule in UNSCALED else read / K**0.5
            outputs[t, values] = o / (o.square().mean() + 1e-5).sqrt() * weights["o_norm.weight"]
        states.append(S)
    gated = torch.stack([o * output_gate(weights, x_t) for o, x_t in zip(outputs, x, strict=True)])
    return gated @ weights["o_proj.weight"].T, torch.stack(states)


def one_step(rule: str, neg_eigval: str, weights: Weights, token: Token, head: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """The rules of `RULES`."""
    step, unit_keys, decay, _ = RULES[rule]
    q, k = token.query(head), token.key(head)
    q, k = unit(q) if step else q, unit(k) if unit_keys else k
    erase, write = torch.zeros(()), torch.ones(())
    if step:
        erase, write = step(gate(weights, token.x, head), k @ k)
        write = write / 2 if neg_eigval == "erase" else write
    transition = (torch.eye(K, dtype=S.dtype) - erase * torch.outer(k, k)) @ decay(weights, token.x, head)
    S = transition @ S + write * torch.outer(k, token.value(head, S.shape[1]))
    return S, S.T @ q


def test_every_rule_is_written_out() -> None:
    assert {*RULES, *UPDATES} == {name for name in list_rules() if registering_module(name) is None}


@pytest.mark.parametrize("rule", [*RULES, *UPDATES])
@pytest.mark.parametrize("expand_v", [1, 1.5])
def test_the_layer_computes_the_papers_equation(rule: str, expand_v: float) -> None:
    """Outputs, states and gradients of whole rows, and outputs of packed sequences and token by token."""
    layer = make_layer(
        rule, HIDDEN, HEADS, K, num_v_heads=VALUE_HEADS, expand_v=expand_v, initializer_range=0.5, layer_idx=0
    ).double()
    torch.nn.init.uniform_(layer.o_norm.weight, 0.5, 2)
    x = torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights, states = dict(layer.named_parameters()), LayerStates()
    made = [by_hand(rule, layer.state_dict(keep_vars=True), row, int(K * expand_v)) for row in x]
    expected, expected_states = (torch.stack(parts) for parts in zip(*made, strict=True))
    y = layer(x, past_key_values=states)
    torch.testing.assert_close(y, expected, **EXACT)
    torch.testing.assert_close(states.states[0].recurrent, expected_states, **EXACT)
    names, leaves, upstream = ["x", *weights], [x, *weights.values()], torch.randn_like(y)
    gradients = [torch.autograd.grad(result, leaves, upstream) for result in (y, expected)]
    for name, found, wanted in zip(names, *gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        packed = layer(x.view(1, -1, HIDDEN), cu_seqlens=torch.tensor([0, TOKENS, 2 * TOKENS]))
        torch.testing.assert_close(packed.view_as(x), expected, **EXACT)
        states = LayerStates()
        stepped = torch.cat([layer(x_t, past_key_values=states) for x_t in x.split(1, dim=1)], dim=1)
        torch.testing.assert_close(stepped, expected, **EXACT)
        torch.testing.assert_close(states.states[0].recurrent, expected_states, **EXACT)


@pytest.mark.parametrize("rule", ["neg_delta_net", "neg_gated_deltanet"])
def test_erasing_alone_can_be_doubled(rule: str) -> None:
    layer = DeltaRuleAttention(
        rule, HIDDEN, HEADS, K, num_v_heads=VALUE_HEADS, expand_v=1, neg_eigval="erase", initializer_range=0.5
    ).double()
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        expected, _ = by_hand(rule, layer.state_dict(), x, K, neg_eigval="erase")
        torch.testing.assert_close(layer(x[None])[0], expected, rtol=0, atol=1e-12)
